"""Asks a role for its health over the standard protocol (grpc.health.v1), as container health checks do."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2

from geartrain.ams.rpc.credentials import Credentials


def is_serving(address: str, timeout_seconds: float = 2.0, service: str = "") -> bool:
    """Return whether the role at ``"host:port"`` answers that it serves, or that ``service`` of it does. One RPC; False
    if nobody answers in time, or there is no such service.
    """
    try:
        return bool(_check(address, timeout_seconds, service).status == health_pb2.HealthCheckResponse.SERVING)
    except grpc.RpcError:
        return False


def answers(address: str, timeout_seconds: float = 2.0) -> bool:
    """Return whether the process at ``"host:port"`` answers at all. One RPC, over a connection of its own."""
    try:
        _check(address, timeout_seconds)
    except grpc.RpcError as exc:
        assert isinstance(exc, grpc.Call)
        return exc.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    return True


def _check(address: str, timeout_seconds: float, service: str = "") -> health_pb2.HealthCheckResponse:
    with Credentials.mine(address).channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        reply: health_pb2.HealthCheckResponse = check(
            health_pb2.HealthCheckRequest(service=service), timeout=timeout_seconds
        )
        return reply
