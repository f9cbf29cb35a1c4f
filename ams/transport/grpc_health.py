"""Asks a role for its health over the standard protocol (grpc.health.v1), as container health checks do."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


def is_serving(address: str, timeout_seconds: float = 2.0) -> bool:
    """Return whether the role at ``"host:port"`` answers that it serves. One RPC; False if nobody answers in time."""
    with grpc.insecure_channel(address) as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_seconds, wait_for_ready=False
            )
        except grpc.RpcError:
            return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
