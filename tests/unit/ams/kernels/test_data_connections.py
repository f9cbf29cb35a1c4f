"""Calls of the data plane, through shared memory and by TCP: what is answered, and what is left when one side
lies or gives up."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from geartrain.ams.kernels import _core
from geartrain.ams.values.errors import MessageTooLarge
from tests.support import frame_codec
from tests.support.frame_calls import ask, begin, dial, expected, flipped, mailboxes, pull, push
from tests.support.toy_shard import SOON, Shard, until


def test_rows_are_read_and_written(shard: Shard) -> None:
    ours = shard.connect()
    (reply,) = ask(ours, pull("rows", [3, 4], with_present=True))
    assert (reply["rows"], reply["present"]) == (expected([3, 4]), b"\0\1")
    (pushed,) = ask(ours, push("rows", [1, 2, 3]))
    assert (pushed["created"], pushed["duplicate"]) == (3, False)
    (assigned,) = ask(ours, push("rows", [1], kind="assign"))
    assert assigned["created"] == 1
    assert (shard.handler.num_writes, shard.handler.sum_written) == (2, 16.0)
    assert mailboxes(ours) == shard.server.num_mailboxes == (shard.way == "ring")


def test_every_operation_of_a_frame_has_its_own_outcome(shard: Shard) -> None:
    ours = shard.connect()
    asked = [pull("rows", [7]), pull("gone", [1]), push("rows", [1, 2]), pull("rows", [-1]), push("rows", [-1])]
    replies = ask(ours, *asked, pull("rows", [8]))
    assert replies[0]["rows"] == expected([7]) and replies[5]["rows"] == expected([8])
    assert (replies[1]["error"], replies[1]["message"]) == ("TableNotFound", "there is no table 'gone'")
    assert replies[2]["created"] == 2
    assert replies[3]["error"] == "InvalidIds"
    assert (replies[4]["error"], replies[4]["retry_after_seconds"]) == ("Busy", 0.25)


def test_nothing_is_acknowledged_by_a_shard_that_may_be_anothers(shard: Shard) -> None:
    ours = shard.connect()
    shard.handler.lose_lease()
    assert {reply["error"] for reply in ask(ours, pull("rows", [1]), push("rows", [1]))} == {"ShardUnavailable"}


@pytest.mark.parametrize("way", ["ring", "tcp", "tls"])
def test_a_secret_opens_one_connection_in_time(make: Callable[..., Shard], way: str) -> None:
    shard = make(way, max_connections=2)
    name, secret, port = shard.server.offer()
    ours = dial(way, name, secret, port)
    for wrong in (secret, bytes(32)):
        with pytest.raises((RuntimeError, OSError), match=r"refuses the connection|closed|reset|[Bb]roken pipe|alert"):
            dial(way, name, wrong, port)
    with pytest.raises(RuntimeError, match="no secret of 32 bytes"):
        dial(way, name, b"short", port)
    other = shard.connect()
    with pytest.raises(RuntimeError, match="has 2 connections already"):
        shard.server.offer()
    late = make(way, greeting_seconds=0)
    with pytest.raises((RuntimeError, OSError), match=r"refuses the connection|closed|reset|[Bb]roken pipe|alert"):
        late.connect()
    for item in (ours, other):
        ask(item, pull("rows", [1]))


def test_who_says_nothing_is_let_go_of(make: Callable[..., Shard]) -> None:
    shard = make(greeting_seconds=0.05)
    name, _, port = shard.server.offer()
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as near,
        socket.create_connection(("127.0.0.1", port)) as far,
    ):
        near.connect("\0" + name)
        far.send(b"GTRF")
        for silent in (near, far):
            silent.settimeout(SOON)
            assert silent.recv(1) == b""


def test_a_write_that_waits_is_answered_when_it_is_done(shard: Shard) -> None:
    ours = shard.connect()
    call, number = begin(ours, [push("later", [1, 2]), pull("rows", [5])])
    assert shard.handler.await_held(SOON)
    assert ask(ours, pull("rows", [1]))[0]["rows"] == expected([1])  # nobody waits for it
    assert shard.handler.answer_later() == 1
    assert call.wait(SOON)
    done, read = frame_codec.parsed_reply(call.reply(), number, [0, 16])
    assert done["created"] == 2 and read["rows"] == expected([5])


def test_a_caller_whose_time_is_nearly_over_is_told_to_ask_again(shard: Shard) -> None:
    ours = shard.connect()
    call, number = begin(ours, [push("later", [1]), pull("rows", [5])], 0.2)
    assert call.wait(SOON)
    pending, read = frame_codec.parsed_reply(call.reply(), number, [0, 16])
    assert pending["error"] == "StepPending" and read["rows"] == expected([5])
    del call
    ask(ours, pull("rows", [6]))
    shard.handler.answer_later()  # too late, into a mailbox that may be another call's
    assert ask(ours, pull("rows", [7]))[0]["rows"] == expected([7])


def test_a_call_that_is_given_up_leaves_its_mailbox_to_the_shard(make: Callable[..., Shard]) -> None:
    shard = make()
    ours, other = shard.connect_ring(), shard.connect_ring()
    both = [ours.begin(64, 64), ours.begin(64, 64)]
    del both  # two mailboxes
    held, _ = begin(ours, [pull("held", [1])])
    assert shard.handler.await_held(SOON)
    assert not held.wait(0.05)
    queued, _ = begin(ours, [push("rows", [1])])
    assert not queued.wait(0.0)
    del held, queued
    assert ours.num_mailboxes == 0
    shard.handler.release()
    assert ask(ours, pull("rows", [2]))[0]["rows"] == expected([2])
    until(lambda: shard.server.num_mailboxes == ours.num_mailboxes + other.num_mailboxes, other)
    assert shard.handler.num_writes == 0  # nobody waited for it


def test_many_calls_side_by_side_do_not_mix(shard: Shard) -> None:
    ours = shard.connect()

    def work(thread: int) -> None:
        random = np.random.default_rng(thread)
        for _ in range(150):
            ids = random.integers(0, 15_000, random.integers(0, 400))
            dim = int(random.integers(1, 20))
            read, written = ask(ours, pull("rows", ids, dim), push("rows", ids, dim))
            assert read["rows"] == expected(ids, dim) and written["created"] == len(ids)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert shard.handler.num_writes == 600
    assert (shard.way == "ring") <= mailboxes(ours) == shard.server.num_mailboxes <= 16


def test_the_shard_holds_no_more_mailboxes_than_it_may(make: Callable[..., Shard]) -> None:
    shard = make(max_mailboxes=2)
    ours, other = shard.connect_ring(), shard.connect_ring()
    calls = [ours.begin(64, 64), other.begin(64, 64)]
    with pytest.raises(_core.ConnectionFull, match="refuses more shared memory"):
        ours.begin(64, 64)
    del calls[1]
    other.close()
    watcher = make().connect()
    until(lambda: shard.server.num_mailboxes == 1, watcher)
    assert ask(ours, pull("rows", [1]))[0]["rows"] == expected([1])


def test_mailboxes_are_bounded_and_large_ones_make_room(make: Callable[..., Shard]) -> None:
    shard = make()
    ours = shard.connect_ring(max_pool_bytes=(7 << 20) + (100 << 10), max_mailboxes=3)
    with pytest.raises(MessageTooLarge, match="pull or push fewer rows"):
        ours.begin(2 << 30, 64)
    larger = ours.begin(7 << 20, 7 << 20)  # a call may take more if it is alone
    del larger
    assert ours.num_mailboxes == 0
    calls = [ours.begin(64, 64) for _ in range(3)]
    with pytest.raises(_core.ConnectionFull):
        ours.begin(64, 64)
    del calls
    assert ours.num_mailboxes == 3
    large = ours.begin(7 << 20, 64)  # the free ones go
    assert ours.num_mailboxes == 1
    del large
    assert ask(ours, pull("rows", [1]))[0]["rows"] == expected([1])


def test_idle_mailboxes_are_let_go_of(make: Callable[..., Shard]) -> None:
    shard = make()
    ours = shard.connect_ring(idle_seconds=0.0)
    for _ in range(3):
        ask(ours, pull("rows", [1]))
    assert ours.num_mailboxes == 1
    other = shard.connect_ring()
    until(lambda: shard.server.num_mailboxes == 2, other)


@pytest.mark.parametrize(("at", "says"), [(80, "an operation's checksum"), (192, "an operation's checksum")])
def test_an_operation_that_was_damaged_is_refused(shard: Shard, at: int, says: str) -> None:
    ours = shard.connect()
    frame = flipped(frame_codec.request(1, 0, [pull("rows", [1]), push("rows", [1])]), at)
    call = ours.begin(len(frame), 4096)
    call.room(len(frame))[:] = np.frombuffer(frame, np.uint8)
    call.send()
    assert call.wait(SOON)
    (reply,) = frame_codec.parsed_reply(call.reply(), 1, [0])
    assert reply["error"] == "ProtocolError" and says in reply["message"]
    assert all("checksum" in item["message"] for item in _core.parse_reply_frame(call.reply(), 1, [(16, 0), (0, 0)]))
    assert shard.handler.num_writes == 0


def test_a_reply_without_room_is_refused(make: Callable[..., Shard]) -> None:
    ours = make().connect()
    frame = frame_codec.request(1, 0, [pull("rows", range(100), 1000)])
    call = ours.begin(len(frame), 4096)
    call.room(len(frame))[:] = np.frombuffer(frame, np.uint8)
    call.send()
    assert call.wait(SOON)
    (reply,) = frame_codec.parsed_reply(call.reply(), 1, [0])
    assert (
        reply["error"] == "ProtocolError"
        and "the reply takes 400128 bytes; the client left room for" in reply["message"]
    )


@pytest.mark.parametrize("at", range(0, 64, 5))
def test_a_damaged_header_ends_the_connection_and_no_other(shard: Shard, at: int) -> None:
    ours, other = shard.connect(), shard.connect()
    frame = flipped(frame_codec.request(1, 0, [push("rows", [1])]), at)
    call = ours.begin(len(frame), 4096)
    call.room(len(frame))[:] = np.frombuffer(frame, np.uint8)
    call.send()
    with pytest.raises(_core.ConnectionLost):
        call.wait(SOON)
    assert ours.is_lost and not other.is_lost
    assert ask(other, pull("rows", [1]))[0]["rows"] == expected([1])
    assert shard.handler.num_writes == 0


def test_calls_under_way_end_with_the_server(shard: Shard) -> None:
    ours = shard.connect()
    call, _ = begin(ours, [push("later", [1])])
    assert shard.handler.await_held(SOON)
    shard.server.close()
    with pytest.raises(_core.ConnectionLost):
        call.wait(SOON)
    with pytest.raises(_core.ConnectionLost):
        ours.begin(64, 64)
    with pytest.raises(RuntimeError, match="shutting down"):
        shard.server.offer()


def test_calls_under_way_end_with_the_connection(shard: Shard) -> None:
    ours, other = shard.connect(), shard.connect()
    call, _ = begin(ours, [pull("held", [1])])
    assert shard.handler.await_held(SOON)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(call.wait, SOON)
        ours.close()
        with pytest.raises(_core.ConnectionLost):
            waiting.result(SOON)
    shard.handler.release()
    until(lambda: shard.server.num_connections == 1, other)
    until(lambda: shard.server.num_mailboxes == mailboxes(other), other)


SMALL = """
import resource, sys
from geartrain.ams.kernels import _core
from tests.support.frame_calls import ask, expected, pull

ours = _core.connect_ring(sys.argv[1], bytes.fromhex(sys.argv[2]), 10.0)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    ours.begin(2 << 20, 64)
except _core.ConnectionFull as exc:
    assert "refuses more shared memory" in str(exc)
    print("full")
assert ask(ours, pull("rows", [2]))[0]["rows"] == expected([2])
print("whole", flush=True)
"""


def test_memory_that_cannot_be_had_costs_nothing(make: Callable[..., Shard]) -> None:
    shard = make()
    name, secret, _ = shard.server.offer()
    done = subprocess.run([sys.executable, "-c", SMALL, name, secret.hex()], capture_output=True, text=True, timeout=60)
    assert done.stdout == "full\nwhole\n", done.stderr


def test_a_write_that_waits_on_keeps_no_memory_of_a_caller_that_was_answered(make: Callable[..., Shard]) -> None:
    shard = make()
    ours, other = shard.connect_ring(), shard.connect_ring()
    assert ask(ours, push("later", [1]), seconds=1.0)[0]["error"] == "StepPending"
    ours.close()
    until(lambda: shard.server.num_mailboxes == mailboxes(other), other)
