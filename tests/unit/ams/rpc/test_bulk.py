"""Bulk connections: only who was offered one has one, and no call reads another's bytes from it."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from geartrain.ams.rpc.payload import bulk
from geartrain.ams.rpc.payload.bulk import BulkConnection, BulkPool, BulkPort, NotOffered, connect
from geartrain.ams.values.errors import BulkConnectionLost

ROWS = np.arange(600_000, dtype=np.float32).reshape(-1, 100)
ENOUGH = bulk.MIN_BULK_BYTES


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def waits(_: Callable[[], None]) -> bool:
    """The caller waits to the end."""
    return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def port(clock: Clock) -> Iterator[BulkPort]:
    found = BulkPort("127.0.0.1", clock=clock)
    yield found
    found.close()


@pytest.fixture
def aside() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as executor:
        yield executor


def opened(port: BulkPort) -> BulkConnection:
    number, offered, secret = port.offer()
    return connect(("127.0.0.1", number), offered, secret)


def test_rows_arrive_as_they_were_sent_both_ways(port: BulkPort, aside: ThreadPoolExecutor) -> None:
    client = opened(port)
    with port.claimed(client.number, 1, waits) as shard:
        sent = aside.submit(client.send, 1, ROWS)
        found = np.empty_like(ROWS)
        shard.receive(1, found)
        sent.result(10)
        np.testing.assert_array_equal(found, ROWS)
    with port.claimed(client.number, 2, waits) as shard:
        sent = aside.submit(shard.send, 2, ROWS[::-1].copy())
        client.receive(2, found)
        sent.result(10)
        np.testing.assert_array_equal(found, ROWS[::-1])


def test_a_secret_is_good_for_one_connection_and_a_while(port: BulkPort, clock: Clock) -> None:
    number, offered, secret = port.offer()
    for wrong in (bytes(len(secret)), secret[:-1] + bytes([secret[-1] ^ 1])):
        with pytest.raises(OSError, match="does not take"):
            connect(("127.0.0.1", number), offered, wrong)
    first = connect(("127.0.0.1", number), offered, secret)
    with pytest.raises(OSError, match="does not take"):
        connect(("127.0.0.1", number), offered, secret)
    assert first.is_wanted and len(port) == 1
    _, offered, secret = port.offer()
    clock.now = bulk.CONNECT_SECONDS
    with pytest.raises(OSError, match="does not take"):
        connect(("127.0.0.1", number), offered, secret)


def test_strangers_who_say_nothing_keep_nobody_waiting(port: BulkPort) -> None:
    number, _, _ = port.offer()
    strangers = [socket.create_connection(("127.0.0.1", number)) for _ in range(8)]
    assert opened(port).is_wanted
    for stranger in strangers:
        stranger.close()


def test_what_does_not_greet_is_no_bulk_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor() as executor:
        refused = executor.submit(connect, other.getsockname(), 1, b"secret")
        connected, _ = other.accept()
        connected.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        with pytest.raises(OSError, match="does not take bulk connections"):
            refused.result(10)
        connected.close()


def test_a_call_that_arrives_twice_or_late_or_beside_another_is_refused(port: BulkPort) -> None:
    client = opened(port)
    with port.claimed(client.number, 2, waits):
        with pytest.raises(BulkConnectionLost, match="while that goes on"), port.claimed(client.number, 3, waits):
            pass
        for late in (1, 2):
            with pytest.raises(BulkConnectionLost, match="arrived twice"), port.claimed(client.number, late, waits):
                pass
    with pytest.raises(BulkConnectionLost, match="arrived twice"), port.claimed(client.number, 2, waits):
        pass
    with pytest.raises(BulkConnectionLost, match="99 is not open here"), port.claimed(99, 1, waits):
        pass
    with port.claimed(client.number, 3, waits):
        pass
    assert client.is_wanted


@pytest.mark.parametrize("other", ["use", "size"])
def test_rows_of_another_call_are_not_taken(port: BulkPort, aside: ThreadPoolExecutor, other: str) -> None:
    client = opened(port)
    sent = aside.submit(client.send, 7 if other == "use" else 8, ROWS if other == "use" else ROWS[1:])
    found = np.zeros_like(ROWS)
    with (
        pytest.raises(BulkConnectionLost, match=r"use [78] with \d+ bytes came; use 8 with 2400000 was due"),
        port.claimed(client.number, 8, waits) as shard,
    ):
        shard.receive(8, found)
    assert shard.is_closed and not found.any()
    with pytest.raises(BulkConnectionLost, match="could not be sent"):
        sent.result(10)
        for _ in range(100):
            client.send(9, ROWS)
    assert client.is_closed
    with pytest.raises(BulkConnectionLost, match="is not open here"), port.claimed(client.number, 9, waits):
        pass


def test_rows_that_do_not_all_come_are_lost(port: BulkPort) -> None:
    client = opened(port)
    client._socket.sendall(bulk._HEAD.pack(1, ROWS.nbytes) + ROWS.tobytes()[:100_000])
    client.close()
    with (
        pytest.raises(BulkConnectionLost, match="did not arrive: the connection ended"),
        port.claimed(client.number, 1, waits) as shard,
    ):
        shard.receive(1, np.empty_like(ROWS))
    assert shard.is_closed


@pytest.mark.parametrize("num_bytes", [0, 8, 100_000])
def test_rows_that_the_network_swallows_are_given_up(port: BulkPort, num_bytes: int) -> None:
    client = opened(port)
    with port.claimed(client.number, 1, waits) as shard:
        shard._socket.sendall((bulk._HEAD.pack(1, ROWS.nbytes) + ROWS.tobytes())[:num_bytes])
        with pytest.raises(BulkConnectionLost, match="did not arrive: not in time"):
            client.receive(1, np.empty_like(ROWS), 0.05)
    assert client.is_closed


def test_rows_that_a_client_does_not_take_are_given_up(port: BulkPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "SILENCE_SECONDS", 0.05)
    client = opened(port)
    with pytest.raises(BulkConnectionLost, match="could not be sent"), port.claimed(client.number, 1, waits) as shard:
        shard.send(1, np.zeros(8 << 20))
    client.close()


def test_a_connection_whose_call_failed_is_not_used_again(port: BulkPort) -> None:
    client = opened(port)
    with pytest.raises(KeyError), port.claimed(client.number, 1, waits):
        raise KeyError
    assert not client.is_wanted
    with pytest.raises(BulkConnectionLost, match="is not open here"), port.claimed(client.number, 2, waits):
        pass


def test_a_shard_waits_no_longer_than_its_caller(port: BulkPort, aside: ThreadPoolExecutor) -> None:
    client = opened(port)
    ends: queue.Queue[Callable[[], None]] = queue.Queue()

    def at_end(end: Callable[[], None]) -> bool:
        ends.put(end)
        return True

    def call(use: int) -> None:
        with port.claimed(client.number, use, at_end) as shard:
            shard.receive(use, np.empty_like(ROWS))

    first = aside.submit(call, 1)
    client.send(1, ROWS)
    first.result(10)
    end_of_first = ends.get(timeout=10)
    second = aside.submit(call, 2)
    client._socket.sendall(bulk._HEAD.pack(2, ROWS.nbytes))
    ends.get(timeout=10)
    end_of_first()  # the second goes on
    client._socket.sendall(ROWS.tobytes())
    second.result(10)
    third = aside.submit(call, 3)
    ends.get(timeout=10)()
    with pytest.raises(BulkConnectionLost, match="did not arrive"):
        third.result(10)


def test_a_caller_that_is_gone_already_is_not_answered(port: BulkPort) -> None:
    client = opened(port)
    with (
        pytest.raises(BulkConnectionLost, match="stopped waiting"),
        port.claimed(client.number, 1, lambda _: False),
    ):
        pytest.fail("nobody waits")
    assert not client.is_wanted


def test_abort_ends_what_another_thread_waits_for(port: BulkPort, aside: ThreadPoolExecutor) -> None:
    client = opened(port)
    waiting = aside.submit(client.receive, 1, np.empty_like(ROWS))
    client.abort()
    with pytest.raises(BulkConnectionLost, match="did not arrive"):
        waiting.result(10)
    assert client.is_closed


def test_the_port_lets_go_of_what_clients_have_closed(port: BulkPort) -> None:
    ours, theirs = opened(port), opened(port)
    theirs.close()
    with port.claimed(ours.number, 1, waits):
        port.forget_closed()
    assert len(port) == 1
    port.forget_closed()
    assert len(port) == 1 and ours.is_wanted


def test_the_port_keeps_a_connection_whose_rows_came_before_their_message(port: BulkPort) -> None:
    client = opened(port)
    client.send(1, ROWS[:10])
    port.forget_closed()
    found = np.empty_like(ROWS[:10])
    with port.claimed(client.number, 1, waits) as shard:
        shard.receive(1, found)
    np.testing.assert_array_equal(found, ROWS[:10])


def test_all_interfaces_are_those_of_both_protocols() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    port = BulkPort("::")
    for host in ("127.0.0.1", "::1"):
        number, offered, secret = port.offer()
        connect((host, number), offered, secret).close()
    port.close()


def test_a_closed_port_ends_connections_and_offers_none(port: BulkPort, aside: ThreadPoolExecutor) -> None:
    idle, busy = opened(port), opened(port)
    began = threading.Event()

    def call() -> None:
        with port.claimed(busy.number, 1, waits) as shard:
            began.set()
            shard.receive(1, np.empty_like(ROWS))

    waiting = aside.submit(call)
    assert began.wait(10)
    port.close()
    with pytest.raises(BulkConnectionLost):
        waiting.result(10)
    assert not idle.is_wanted and not busy.is_wanted
    port.close()


def test_a_port_in_use_and_too_many_connections_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = BulkPort("127.0.0.1", other.getsockname()[1])
        with pytest.raises(NotOffered, match="cannot listen for bulk connections"):
            taken.offer()
    monkeypatch.setattr(bulk, "MOST_HELD", 2)
    port = BulkPort("127.0.0.1")
    kept = opened(port)
    port.offer()
    with pytest.raises(NotOffered, match="2 bulk connections are taken already"):
        port.offer()
    assert kept.is_wanted
    port.close()


class Client:
    """A pool whose connections are made when a call lacks one."""

    def __init__(self, port: BulkPort, clock: Clock) -> None:
        self.port = port
        self.error: Exception | None = None
        self.pool = BulkPool(self.make, clock=clock, begin=lambda work: work())
        self.num_made = 0

    def make(self) -> BulkConnection:
        self.num_made += 1
        if self.error is not None:
            raise self.error
        return opened(self.port)

    def connection(self) -> BulkConnection:
        """One in use."""
        found = self.pool.take(ENOUGH) or self.pool.take(ENOUGH)
        assert found is not None
        return found


def test_a_pool_has_as_many_connections_as_calls_at_once(port: BulkPort, clock: Clock) -> None:
    client = Client(port, clock)
    assert client.pool.take(ENOUGH - 1) is None and client.num_made == 0
    first = client.connection()
    client.pool.give_back(first)
    again = client.connection()
    assert again is first and again.num_uses == 2 and client.num_made == 1
    others = [client.connection() for _ in range(bulk.MOST_POOL_CONNECTIONS - 1)]
    assert client.pool.take(ENOUGH) is None and client.pool.take(ENOUGH) is None
    assert client.num_made == client.pool.num_connections == bulk.MOST_POOL_CONNECTIONS
    others[0].close()
    assert client.connection().num_uses == 1


def test_a_pool_gives_no_connection_that_the_shard_has_closed(port: BulkPort, clock: Clock) -> None:
    client = Client(port, clock)
    client.pool.give_back(client.connection())
    port.close()
    client.port = BulkPort("127.0.0.1")
    found = client.connection()
    assert found.is_wanted and client.num_made == 2 and client.pool.num_connections == 1
    client.port.close()


def test_a_refusal_holds_for_a_while(port: BulkPort, clock: Clock) -> None:
    client = Client(port, clock)
    client.error = NotOffered("too many")
    kept = opened(port)
    for _ in range(3):
        assert client.pool.take(ENOUGH) is None
    assert client.num_made == 1
    client.pool.give_back(kept)
    assert kept.is_closed
    client.error, clock.now = None, bulk.PAUSE_SECONDS
    assert client.connection().is_wanted


def test_after_a_call_without_an_answer_no_connection_is_trusted(port: BulkPort, clock: Clock) -> None:
    client = Client(port, clock)
    idle, busy = client.connection(), client.connection()
    client.pool.give_back(idle)
    client.pool.distrust()
    assert idle.is_closed and not busy.is_closed
    client.pool.give_back(busy)
    assert busy.is_closed and client.pool.take(ENOUGH) is None and client.num_made == 2
    clock.now = bulk.DISTRUST_SECONDS
    assert client.connection().is_wanted


def test_a_closed_pool_has_nothing_and_closes_what_comes_back(port: BulkPort, clock: Clock) -> None:
    client = Client(port, clock)
    idle, busy = client.connection(), client.connection()
    client.pool.give_back(idle)
    client.pool.close()
    assert idle.is_closed and not busy.is_closed
    client.pool.give_back(busy)
    assert busy.is_closed and client.pool.take(ENOUGH) is None


def test_one_connection_is_made_at_a_time_and_one_that_never_comes_is_given_up(port: BulkPort, clock: Clock) -> None:
    begun: list[Callable[[], None]] = []
    pool = BulkPool(lambda: opened(port), clock=clock, begin=begun.append)
    for _ in range(3):
        assert pool.take(ENOUGH) is None
    assert len(begun) == 1
    clock.now = 31.0
    assert pool.take(ENOUGH) is None
    assert len(begun) == 2
    begun[1]()
    assert pool.take(ENOUGH) is not None


def test_a_forked_child_leaves_the_connections_to_its_parent(port: BulkPort, clock: Clock) -> None:
    client = Client(port, clock)
    connection = client.connection()
    parents = connection._socket.dup()
    client.pool.begin_anew()  # what happens in the child
    assert connection.is_closed and client.pool.take(ENOUGH) is None
    with port.claimed(connection.number, 1, waits) as shard:
        shard.send(1, ROWS[:1])
    assert parents.recv(16) == bulk._HEAD.pack(1, ROWS[:1].nbytes)
    parents.close()
