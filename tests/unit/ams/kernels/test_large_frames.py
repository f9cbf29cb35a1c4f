"""Large requests by TCP, when there is room for one of them: they wait for each other without taking memory."""

from __future__ import annotations

import socket
from collections.abc import Iterator

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
    server = _core.DataServer(handler, host="127.0.0.1", most_received_bytes=1 << 20)
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
