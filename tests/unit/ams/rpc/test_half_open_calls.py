"""Calls that begin and do not send their messages hold nobody else's up, and are ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from geartrain.ams.rpc.server import threads as call_threads
from geartrain.ams.rpc.server.server import GrpcServer, ServedMethods
from geartrain.ams.rpc.server.threads import CallThreads

SECONDS = 60.0
HalfOpen = Callable[[str, int], list[grpc.Call]]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def lane(stack: ExitStack) -> CallThreads:
    lane = stack.enter_context(CallThreads(2, "own-lane"))
    stack.callback(lane.close)
    return lane


@pytest.fixture
def server(stack: ExitStack, lane: CallThreads) -> GrpcServer:
    """``Beat`` has a lane, as heartbeats have; ``Echo`` has none."""
    server = GrpcServer("127.0.0.1:0", 64 << 20)
    server.add(ServedMethods("s", {"Beat": lambda data, _: data, "Echo": lambda data, _: data}), lanes={"Beat": lane})
    server.start()
    server.ready()
    stack.callback(server.stop, 0)
    return server


@pytest.fixture
def half_open(stack: ExitStack, server: GrpcServer, lane: CallThreads) -> HalfOpen:
    """Begin calls of a method, a connection for each eight, that send no message until the test is over."""
    over = threading.Event()
    stack.callback(over.set)

    def no_message() -> Iterator[bytes]:
        over.wait(SECONDS)
        yield from ()

    def begin(method: str, count: int) -> list[grpc.Call]:
        calls = []
        for number in range(count):
            if number % 8 == 0:
                channel = stack.enter_context(
                    grpc.insecure_channel(server.address, [("grpc.use_local_subchannel_pool", 1)])
                )
            calls.append(channel.stream_unary(method).future(no_message()))
        pools = {"/s/Beat": lane, "/s/Echo": server.calls}
        pool, deadline = pools.get(method, server._health_pool), time.monotonic() + SECONDS
        while len(pool._reading) + len(pool._line) + sum(call.done() for call in calls) < count:
            assert time.monotonic() < deadline
        return calls

    return begin


@pytest.mark.parametrize("count", [16, 200])
@pytest.mark.parametrize("method", ["/s/Beat", "/s/Echo", "/grpc.health.v1.Health/Check"])
def test_who_begins_calls_and_sends_no_messages_keeps_nobody_waiting_for_long(
    stack: ExitStack, server: GrpcServer, half_open: HalfOpen, method: str, count: int
) -> None:
    strangers = half_open(method, count)
    ours = stack.enter_context(grpc.insecure_channel(server.address))
    for _ in range(3):
        if method.startswith("/s/"):
            assert ours.unary_unary(method)(b"data", timeout=SECONDS) == b"data"
        else:
            asked = health_pb2.HealthCheckRequest(service="s")
            health_pb2_grpc.HealthStub(ours).Check(asked, timeout=SECONDS)
    assert len(strangers) == count  # grpc ends calls that nobody holds


def test_a_call_whose_message_does_not_come_is_ended(half_open: HalfOpen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_threads, "MESSAGE_SECONDS", 0.2)
    (call,) = half_open("/s/Echo", 1)
    assert call.code() is not grpc.StatusCode.OK


def test_a_pause_of_the_server_is_not_counted_against_calls_whose_messages_arrive(
    stack: ExitStack, server: GrpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        ahead = 0.0

        def monotonic(self) -> float:
            return time.monotonic() + self.ahead

    clock = Clock()
    monkeypatch.setattr(call_threads, "time", clock)
    resumed = threading.Event()

    def late_message() -> Iterator[bytes]:
        resumed.wait(SECONDS)
        yield b"data"

    channel = stack.enter_context(grpc.insecure_channel(server.address))
    call = channel.stream_unary("/s/Echo").future(late_message())
    deadline = time.monotonic() + SECONDS
    while not any(reading.began for reading in list(server.calls._reading)):
        assert time.monotonic() < deadline
    clock.ahead = call_threads.MESSAGE_SECONDS + 1
    threading.Event().wait(0.5)  # several looks
    resumed.set()
    assert call.result(SECONDS) == b"data"


def test_few_calls_hold_messages_that_are_not_whole(server: GrpcServer, lane: CallThreads, half_open: HalfOpen) -> None:
    methods = ("/s/Echo", "/s/Beat", "/grpc.health.v1.Health/Check")
    strangers = [half_open(method, 50) for method in methods]
    reading = [len(threads._reading) for threads in (server.calls, lane, server._health_pool)]
    assert reading[0] * (64 << 20) <= call_threads.READING_BYTES
    assert max(reading[1:]) <= 2  # of each lane, whose own messages are small
    assert [len(calls) for calls in strangers] == [50, 50, 50]


def test_a_call_that_is_at_work_for_long_is_not_ended(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_POLL_SECONDS", "_IDLE_LOOK_SECONDS"):
        monkeypatch.setattr(call_threads, name, 0.01)
    server, go_on, running = GrpcServer("127.0.0.1:0", 1 << 20), threading.Event(), threading.Barrier(9)

    def slow(data: bytes, _: grpc.ServicerContext) -> bytes:
        running.wait(SECONDS)
        go_on.wait(SECONDS)
        return data

    server.add(ServedMethods("s", {"Slow": slow}))
    server.start()
    stack.callback(server.stop, 0)
    channel = stack.enter_context(grpc.insecure_channel(server.address))
    calls = [channel.unary_unary("/s/Slow").future(b"data") for _ in range(8)]
    running.wait(SECONDS)
    for name in ("MESSAGE_SECONDS", "_CROWDED_SECONDS"):  # now: a busy machine takes longer to bring the messages
        monkeypatch.setattr(call_threads, name, 0.01)
    threading.Event().wait(0.2)  # several looks
    go_on.set()
    assert [call.result(SECONDS) for call in calls] == [b"data"] * 8


def test_where_a_network_is_slow_for_everybody_messages_arrive_all_the_same(
    stack: ExitStack, server: GrpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_threads, "_CROWDED_SECONDS", 0.02)
    monkeypatch.setattr(call_threads, "_POLL_SECONDS", 0.01)
    waited = threading.Event()

    def slow_message() -> Iterator[bytes]:
        waited.wait(0.2)
        yield b"data"

    def ask(channel: grpc.Channel) -> bool:
        for _ in range(100):
            with suppress(grpc.RpcError):
                return bool(channel.stream_unary("/s/Echo")(slow_message(), timeout=SECONDS) == b"data")
        return False

    options = [("grpc.use_local_subchannel_pool", 1)]
    channels = [stack.enter_context(grpc.insecure_channel(server.address, options)) for _ in range(16)]
    with ThreadPoolExecutor(len(channels)) as clients:
        assert all(clients.map(ask, channels))
