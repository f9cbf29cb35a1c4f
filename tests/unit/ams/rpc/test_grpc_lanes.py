"""gRPC runs the methods of a lane on threads of their own. grpcio calls that experimental: here it is tried."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from geartrain.ams.rpc.server import server as grpc_server
from geartrain.ams.rpc.server.server import GrpcServer, ServedMethods

DEADLINE_SECONDS = 30.0
THREADS = 2


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[grpc.Channel]:
    """A channel to a server whose every thread waits in ``Slow``; ``Quick`` has a lane."""
    monkeypatch.setattr(grpc_server, "MAX_CONCURRENT_CALLS", THREADS)
    server = GrpcServer("127.0.0.1:0", 1 << 20)
    running = threading.Barrier(THREADS + 1)
    go_on = threading.Event()

    def slow(data: bytes, _: grpc.ServicerContext) -> bytes:
        running.wait(DEADLINE_SECONDS)
        go_on.wait(DEADLINE_SECONDS)
        return data

    def quick(_: bytes, __: grpc.ServicerContext) -> bytes:
        return threading.current_thread().name.encode()

    with ExitStack() as stack:
        lane = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="own-lane"))
        server.add(ServedMethods("s", {"Slow": slow, "Quick": quick}), lanes={"Quick": lane})
        server.start()
        server.ready()
        stack.callback(server.stop, 0)
        channel = stack.enter_context(grpc.insecure_channel(server.address))
        stack.callback(go_on.set)
        calls: list[Future[bytes]] = [channel.unary_unary("/s/Slow").future(b"") for _ in range(THREADS)]
        running.wait(DEADLINE_SECONDS)
        yield channel
        go_on.set()
        assert [call.result(DEADLINE_SECONDS) for call in calls] == [b""] * THREADS


def test_a_method_with_a_lane_is_answered_while_all_other_threads_wait(blocked: grpc.Channel) -> None:
    answer = blocked.unary_unary("/s/Quick")(b"", timeout=DEADLINE_SECONDS)
    assert answer.startswith(b"own-lane")


def test_health_is_answered_while_all_other_threads_wait(blocked: grpc.Channel) -> None:
    asked = health_pb2.HealthCheckRequest(service="s")
    reply = health_pb2_grpc.HealthStub(blocked).Check(asked, timeout=DEADLINE_SECONDS)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_services_are_listed_where_reflection_is_asked_for() -> None:
    server = GrpcServer("127.0.0.1:0", 1 << 20, reflection=True)
    server.add(ServedMethods("s", {}))
    server.start()
    try:
        with grpc.insecure_channel(server.address) as channel:
            ask = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            (listed,) = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(ask)
            assert "s" in [entry.name for entry in listed.list_services_response.service]
    finally:
        server.stop(0)
