"""Health checks of a role over the standard protocol (grpc.health.v1), as container health checks do."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2

from geartrain.ams.rpc.carrier import AttemptFailed, CertificateRejected, remedy
from geartrain.ams.rpc.credentials import Credentials
from geartrain.ams.rpc.status import error_from
from geartrain.ams.values.config import identity


def is_serving(address: str, timeout_seconds: float = 2.0, service: str = "") -> bool:
    """Return whether the role at ``"host:port"``, or its ``service``, reports that it serves. One RPC; False without an
    answer in time, or without such a service.
    """
    return not why_not_serving(address, timeout_seconds, service)


def why_not_serving(address: str, timeout_seconds: float = 2.0, service: str = "") -> str:
    """Return the reason why :func:`is_serving` is False, and the remedy; empty: it serves."""
    try:
        status = _check(address, timeout_seconds, service).status
    except grpc.RpcError as exc:
        assert isinstance(exc, grpc.Call)
        if exc.code() is grpc.StatusCode.NOT_FOUND:
            return f"{address} has no service {service!r}; ask a scheduler for it"
        failure = error_from(exc, address)
        shown = ""
        if isinstance(failure, CertificateRejected):
            folder, role = identity(address)
            shown = f"; this process shows {f'{folder}/{role}.pem' if folder else 'none: it has no security.folder'}"
        return f"{failure}{shown}{f'; {remedy(failure)}' if isinstance(failure, AttemptFailed) else ''}"
    if status == health_pb2.HealthCheckResponse.SERVING:
        return ""
    what = f"{service!r} is not so yet" if service else "it does not serve yet, or is ending"
    return f"{address} answers: {what}; its log and 'geartrain status' say more"


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
