"""Calls of the data plane by TCP: several on one connection, and who sends or takes too much or too little."""

from __future__ import annotations

import _thread
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from geartrain.ams.kernels import _core
from geartrain.ams.values.errors import MessageTooLarge
from tests.support import frame_codec
from tests.support.frame_calls import ask, begin, expected, flipped, pull, push
from tests.support.toy_shard import SOON, Shard, until


def test_a_call_given_up_by_tcp_leaves_the_connection_to_the_others(make: Callable[..., Shard]) -> None:
    shard = make("tcp")
    ours = shard.connect()
    held, _ = begin(ours, [pull("held", range(1000))])
    assert shard.handler.await_held(SOON)
    assert not held.wait(0.05)
    del held
    other, number = begin(ours, [pull("rows", [3])])
    shard.handler.release()
    assert other.wait(SOON)  # behind the reply that nobody wants
    assert frame_codec.parsed_reply(other.reply(), number, [16])[0]["rows"] == expected([3])


def test_calls_that_no_frame_may_hold_are_refused_by_tcp(make: Callable[..., Shard]) -> None:
    ours = make("tcp").connect(max_frame_bytes=1 << 20, max_in_flight_bytes=1 << 20)
    for sizes in ((2 << 20, 64), (64, 2 << 20)):
        with pytest.raises(MessageTooLarge, match="pull or push fewer rows"):
            ours.begin(*sizes)
    call = ours.begin(64, 1 << 19)
    with pytest.raises(_core.ConnectionFull, match="in flight"):
        ours.begin(64, 1 << 19)
    del call
    assert ours.begin(64, 1 << 19) is not None


def test_large_frames_travel_both_ways_at_once_by_tcp(make: Callable[..., Shard]) -> None:
    """More than all socket buffers hold, so that who sends must read meanwhile."""
    ours = make("tcp").connect()
    ids = range(4_000)

    def work(_: int) -> None:
        for _ in range(3):
            read, written = ask(ours, pull("rows", ids, 256), push("rows", ids, 256))
            assert read["rows"] == expected(ids, 256) and written["created"] == len(ids)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))


def test_a_shard_takes_no_more_memory_for_frames_than_it_may(make: Callable[..., Shard]) -> None:
    shard = make("tcp", max_frame_bytes=1 << 20, most_bytes=200 << 10)
    ours = shard.connect()
    small = pull("rows", [1])
    for large in (push("rows", range(10_000), 8), pull("rows", range(10_000), 8)):
        (reply,) = ask(ours, large)
        assert (reply["error"], reply["retry_after_seconds"]) == ("Busy", 0.1)
        assert ask(ours, small)[0]["rows"] == expected([1])
    (reply,) = ask(ours, pull("rows", range(100), 4_000))
    assert reply["error"] == "MessageTooLarge" and "pull fewer rows at once" in reply["message"]
    with pytest.raises(_core.ConnectionLost):
        ask(ours, push("rows", range(50_000), 8))  # nothing is read of what is too large
    assert ask(shard.connect(), small)[0]["rows"] == expected([1])


def test_a_client_that_stops_in_the_middle_of_a_frame_is_let_go_of(make: Callable[..., Shard]) -> None:
    shard = make("tcp", silence_seconds=0.1)
    _, secret, port = shard.server.offer()
    with socket.create_connection(("127.0.0.1", port)) as ours:
        ours.settimeout(SOON)
        ours.sendall(frame_codec.header(3, 0, 0, 32) + secret)
        assert ours.recv(64, socket.MSG_WAITALL) == frame_codec.header(3, 0, 0, 0)
        frame = frame_codec.request(1, 0, [push("rows", range(100))])
        for byte in frame[:200]:  # in pieces, however small
            ours.send(bytes([byte]))
        ours.sendall(frame[200:])
        head = ours.recv(64, socket.MSG_WAITALL)
        rest = ours.recv(frame_codec.HEADER.unpack(head[:56])[6], socket.MSG_WAITALL)
        assert frame_codec.parsed_reply(head + rest, 1, [0])[0]["created"] == 100
        ours.sendall(frame[:-1])
        assert ours.recv(1) == b""
    assert shard.handler.num_writes == 1


def test_a_client_that_takes_no_replies_is_not_read_on_and_let_go_of(make: Callable[..., Shard]) -> None:
    shard = make("tcp", silence_seconds=0.3)
    _, secret, port = shard.server.offer()
    with socket.create_connection(("127.0.0.1", port)) as ours:
        ours.sendall(frame_codec.header(3, 0, 0, 32) + secret)
        frame = frame_codec.request(1, 0, [pull("rows", range(4_000), 1_000)])
        with pytest.raises(OSError, match=r"reset|pipe"):  # 16 MB each
            for _ in range(10_000):
                ours.sendall(frame)
    until(lambda: shard.server.num_connections == 1, shard.connect())


@pytest.mark.parametrize("reply", ["another call's", "too long", "damaged", "cut"])
def test_a_shard_that_answers_otherwise_is_left_by_tcp(reply: str) -> None:
    good = frame_codec.reply(5, [{"created": 1}])
    data = {
        "another call's": frame_codec.reply(6, [{"created": 1}]) + good,
        "too long": frame_codec.reply(5, [{"rows": bytes(10_000)}]),
        "damaged": flipped(good, 20),
        "cut": good[:-1],
    }[reply]
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:

        def serve() -> None:
            there, _ = listener.accept()
            with there:
                there.recv(96, socket.MSG_WAITALL)
                there.sendall(frame_codec.header(3, 0, 0, 0))
                there.recv(1)
                there.sendall(data)

        serving = threads.submit(serve)
        ours = _core.connect_tcp("127.0.0.1", listener.getsockname()[1], bytes(32), SOON)
        frame = frame_codec.request(5, 0, [push("rows", [1])])
        call = ours.begin(len(frame), 2048)
        call.room(len(frame))[:] = np.frombuffer(frame, np.uint8)
        call.send()
        if reply == "another call's":  # that was given up, perhaps
            assert call.wait(SOON)
            assert frame_codec.parsed_reply(call.reply(), 5, [0])[0]["created"] == 1
        else:
            with pytest.raises(_core.ConnectionLost):
                call.wait(SOON)
        serving.result()


def test_where_no_shard_listens_by_tcp_nothing_is_connected_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(RuntimeError, match="does not answer"):
            _core.connect_tcp("127.0.0.1", port, bytes(32), 0.05)
    with pytest.raises(OSError, match="refused"):
        _core.connect_tcp("127.0.0.1", port, bytes(32), SOON)
    with pytest.raises(RuntimeError, match="no address of"):
        _core.connect_tcp("no.such.host.invalid", 1, bytes(32), SOON)
    with pytest.raises(OSError, match="cannot listen"):
        _core.DataServer(_core.ToyHandler(), host="192.0.2.1")


def test_a_reply_that_came_in_time_is_read_by_tcp_though_it_is_asked_for_late(make: Callable[..., Shard]) -> None:
    shard = make("tcp")
    ours, other = shard.connect(), shard.connect()
    first, _ = begin(ours, [push("rows", range(1000))])
    second, _ = begin(ours, [push("rows", [3])])
    until(lambda: shard.handler.num_writes == 2, other)
    ask(other, pull("rows", [1]))  # both are answered
    assert second.wait(0) and first.wait(0)
    third, _ = begin(ours, [pull("held", [1])])
    assert not third.wait(0)


@contextmanager
def takes_nothing() -> Iterator[_core.DataConnection]:
    """A connection by TCP to a shard that greets and is silent from then on."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:

        def serve() -> None:
            there, _ = listener.accept()
            with there:
                there.sendall(frame_codec.header(3, 0, 0, 0))
                over.wait(60)

        threads.submit(serve)
        try:
            yield _core.connect_tcp("127.0.0.1", listener.getsockname()[1], bytes(32), SOON)
        finally:
            over.set()


def test_a_shard_that_takes_no_bytes_is_waited_for_as_long_as_the_caller_wants() -> None:
    with takes_nothing() as ours:
        began = time.monotonic()
        with pytest.raises(_core.ConnectionLost):
            ours.begin(64 << 20, 64).send(0.2)
        assert time.monotonic() - began < SOON
    with takes_nothing() as ours, ThreadPoolExecutor(1) as threads:
        writing = threads.submit(ours.begin(64 << 20, 64).send)
        while not writing.running():
            pass
        ours.close()
        with pytest.raises(_core.ConnectionLost):
            writing.result(SOON)


def test_ctrl_c_ends_what_is_sent_to_a_shard_that_takes_no_bytes() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    try:
        with takes_nothing() as ours:
            call = ours.begin(64 << 20, 64)
            threading.Timer(0.05, _thread.interrupt_main).start()
            with pytest.raises(KeyboardInterrupt):
                call.send()
            assert ours.is_lost  # it has half of a frame
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < SOON


@pytest.mark.exact_memory
def test_a_request_that_there_is_no_memory_for_takes_none_of_what_may_be_in_flight(make: Callable[..., Shard]) -> None:
    ours = make("tcp").connect(max_frame_bytes=1 << 60, max_in_flight_bytes=1 << 60)
    for _ in range(2):
        with pytest.raises(MemoryError):
            ours.begin(3 << 58, 64)


def test_strangers_by_tcp_keep_nobody_from_shared_memory(make: Callable[..., Shard]) -> None:
    shard = make("tcp", greeting_seconds=60.0)
    _, _, port = shard.server.offer()
    with ExitStack() as strangers:
        for _ in range(70):
            strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
        assert ask(shard.connect_ring(), pull("rows", [1]))[0]["rows"] == expected([1])
