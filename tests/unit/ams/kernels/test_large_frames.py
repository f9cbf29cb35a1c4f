"""Large requests by TCP, when there is room for one of them: they wait for each other without taking memory."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest

from geartrain.ams.kernels import _core
from tests.support import frame_codec
from tests.support.frame_calls import ask, begin, dial, expected, pull, push

SOON = 10.0
LATER = 0.05
"""Seconds in which what must not happen would have happened."""
ROWS = range(30_000)
"""720 kB with their ids: more than half of the room."""


@pytest.fixture
def handler() -> _core.ToyHandler:
    return _core.ToyHandler()


@pytest.fixture
def server(handler: _core.ToyHandler) -> Iterator[_core.DataServer]:
    server = _core.DataServer(handler, host="127.0.0.1", max_received_bytes=1 << 20)
    yield server
    server.close()


@pytest.fixture
def half_sent(server: _core.DataServer) -> Iterator[tuple[socket.socket, bytes]]:
    """A client that has sent half of a large request, and the other half."""
    _, secret, port = server.offer()
    frame = frame_codec.request(1, 0, [push("rows", ROWS)])
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(SOON)
        client.sendall(frame_codec.header(3, 0, 0, 32) + secret)
        assert client.recv(64, socket.MSG_WAITALL) == frame_codec.header(3, 0, 0, 0)
        client.sendall(frame[: len(frame) // 2])
        yield client, frame[len(frame) // 2 :]


def connect(server: _core.DataServer) -> _core.DataConnection:
    return dial("tcp", *server.offer())


def test_large_requests_wait_for_each_other_and_small_ones_for_none(
    server: _core.DataServer, handler: _core.ToyHandler, half_sent: tuple[socket.socket, bytes]
) -> None:
    sides = [connect(server) for _ in range(4)]
    ask(sides[0], pull("rows", [1]))
    waiting = [begin(side, [push("rows", ROWS)])[0] for side in sides[:3]]
    assert not any(call.wait(LATER) for call in waiting)
    assert ask(sides[3], pull("rows", [3]))[0]["rows"] == expected([3])
    assert ask(sides[3], push("rows", [3]))[0]["created"] == 1
    client, rest = half_sent
    client.sendall(rest)
    assert client.recv(64, socket.MSG_WAITALL)[:4] == b"GTRF"
    assert all(call.wait(SOON) for call in waiting)
    assert handler.num_writes == 5


def test_who_waits_too_long_is_told_that_the_shard_is_busy(
    server: _core.DataServer, handler: _core.ToyHandler, half_sent: tuple[socket.socket, bytes]
) -> None:
    ours = connect(server)
    (reply,) = ask(ours, push("rows", ROWS), seconds=0.2)
    assert (reply["error"], reply["retry_after_seconds"]) == ("Busy", 0.1)
    assert ask(ours, pull("rows", [3]))[0]["rows"] == expected([3])
    client, rest = half_sent
    client.sendall(rest)
    assert client.recv(64, socket.MSG_WAITALL)[:4] == b"GTRF"
    assert ask(ours, push("rows", ROWS))[0]["created"] == len(ROWS)
    assert handler.num_writes == 2


def test_who_goes_while_it_waits_or_sends_makes_room(
    server: _core.DataServer, handler: _core.ToyHandler, half_sent: tuple[socket.socket, bytes]
) -> None:
    ours, gone = connect(server), connect(server)
    ask(ours, pull("rows", [1]))
    left = begin(gone, [push("rows", ROWS)])[0]
    assert not left.wait(LATER)
    waiting = begin(ours, [push("rows", ROWS)])[0]
    gone.close()
    assert not waiting.wait(LATER)
    half_sent[0].close()
    assert waiting.wait(SOON)
    assert handler.num_writes == 1


def greeted(server: _core.DataServer, source: str = "127.0.0.1") -> socket.socket:
    """A connection whose bytes are the test's own, from an address of this machine."""
    _, secret, port = server.offer()
    client = socket.create_connection(("127.0.0.1", port), source_address=(source, 0))
    client.settimeout(SOON)
    client.sendall(frame_codec.header(3, 0, 0, 32) + secret)
    assert client.recv(64, socket.MSG_WAITALL) == frame_codec.header(3, 0, 0, 0)
    return client


def dribble(work: Callable[[], bytes | int], over: threading.Event) -> str:
    """Send or take a little again and again, until the shard has ended the connection; what that was."""
    try:
        while not over.wait(0.005):
            if work() in (b"", 0):
                return "ended"
    except OSError:
        return "ended"
    return "is there still"


def test_who_sends_a_large_request_slowly_is_let_go_of_when_another_waits_for_room(handler: _core.ToyHandler) -> None:
    server = _core.DataServer(handler, host="127.0.0.1", max_received_bytes=1 << 20, silence_seconds=6.0)
    frame = frame_codec.request(1, 0, [push("rows", ROWS)])
    over = threading.Event()
    with ExitStack() as stack:
        stack.callback(server.close)
        threads = stack.enter_context(ThreadPoolExecutor(3))
        stack.callback(over.set)
        slow = [stack.enter_context(greeted(server)) for _ in range(3)]
        for client in slow:
            client.sendall(frame[:200])
        ends = [threads.submit(dribble, partial(client.send, b"\0"), over) for client in slow]
        ours = connect(server)
        for _ in range(3):
            assert ask(ours, push("rows", ROWS), seconds=20 * SOON)[0]["created"] == len(ROWS)
        assert [end.result(SOON) for end in ends] == ["ended"] * 3
    assert handler.num_writes == 3


def test_who_takes_large_replies_slowly_is_let_go_of_when_there_is_little_room_for_others(
    handler: _core.ToyHandler,
) -> None:
    server = _core.DataServer(handler, host="127.0.0.1", most_bytes=64 << 20, silence_seconds=6.0)
    frame = frame_codec.request(1, 0, [pull("rows", range(10_000), 1_000)])
    over = threading.Event()
    with ExitStack() as stack:
        stack.callback(server.close)
        threads = stack.enter_context(ThreadPoolExecutor(1))
        stack.callback(over.set)
        slow = stack.enter_context(greeted(server))
        slow.sendall(frame)
        assert slow.recv(64, socket.MSG_WAITALL)[:4] == b"GTRF"
        threads.submit(dribble, partial(slow.recv, 1), over)
        ours, deadline = connect(server), time.monotonic() + SOON
        while "error" in (told := ask(ours, pull("rows", range(10_000), 1_000))[0]):
            assert told["error"] == "Busy" and time.monotonic() < deadline
        assert server.num_connections == 1


def test_who_asks_on_and_takes_no_replies_is_let_go_of_when_there_is_little_room_for_others(
    handler: _core.ToyHandler,
) -> None:
    """It is not read any more, so that something of its own lies unread, which is not the shard's fault."""
    server = _core.DataServer(handler, host="127.0.0.1", most_bytes=80 << 20, silence_seconds=6.0)
    frame = frame_codec.request(1, 0, [pull("rows", range(1_000), 1_000)])
    over = threading.Event()
    with ExitStack() as stack:
        stack.callback(server.close)
        threads = stack.enter_context(ThreadPoolExecutor(1))
        stack.callback(over.set)
        slow = stack.enter_context(greeted(server))
        slow.sendall(frame * 60)
        assert slow.recv(64, socket.MSG_WAITALL)[:4] == b"GTRF"
        end = threads.submit(dribble, lambda: len(slow.recv(1 << 14)), over)
        ours, deadline = connect(server), time.monotonic() + SOON
        while server.num_connections > 1 and time.monotonic() < deadline:
            ask(ours, pull("rows", range(4_000), 1_000))
        assert server.num_connections == 1
        assert end.result(SOON) == "ended"


def test_who_has_many_connections_takes_the_turn_of_no_other_machine(
    server: _core.DataServer, handler: _core.ToyHandler, half_sent: tuple[socket.socket, bytes]
) -> None:
    """Of 127.0.0.1 one request is under way, and three wait; of 127.0.0.2 one, which came last."""
    frame = frame_codec.request(1, SOON, [push("rows", ROWS)])
    with ExitStack() as stack:
        many = [stack.enter_context(greeted(server)) for _ in range(3)]
        other = stack.enter_context(greeted(server, "127.0.0.2"))
        for client in (*many, other):
            client.sendall(frame[:64])
            ask(connect(server), pull("rows", [1]))  # the shard has read it
        other.sendall(frame[64:])
        client, rest = half_sent
        client.sendall(rest)
        assert client.recv(64, socket.MSG_WAITALL)[:4] == b"GTRF"
        assert other.recv(64, socket.MSG_WAITALL)[:4] == b"GTRF"  # though none of the three has sent its rest
        for client in many:
            client.sendall(frame[64:])
        for client in many:
            assert client.recv(64, socket.MSG_WAITALL)[:4] == b"GTRF"
    assert handler.num_writes == 5
