"""Asks a role for its health over the standard protocol (grpc.health.v1), as container health checks do."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2


def is_serving(address: str, timeout_seconds: float = 2.0) -> bool:
    """Return whether the role at ``"host:port"`` answers that it serves. One RPC; False if nobody answers in time."""
    with grpc.insecure_channel(address) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            reply = check(health_pb2.HealthCheckRequest(), timeout=timeout_seconds)
        except grpc.RpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
