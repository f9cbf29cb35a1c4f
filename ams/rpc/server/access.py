"""Who may make which call: the roles of the callers of every RPC, as their certificates name them.

What is in no list is refused. A refusal is logged here, and tells its caller nothing more.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import grpc

from geartrain.ams.rpc.credentials import ANY_NUMBER, Name, names_of
from geartrain.ams.rpc.services import GEAR, GRAPH, SCHEDULER, SHARD
from geartrain.ams.values.config import CERTIFIED_ROLES
from geartrain.ams.values.errors import GeartrainError

logger = logging.getLogger(__name__)

_ALL = frozenset(CERTIFIED_ROLES)
_READERS = frozenset({"client", "slowgear", "graph"})
_WRITERS = frozenset({"client", "slowgear"})
_SHARDS = frozenset({"server"})
_SCHEDULER = frozenset({"scheduler"})
_CLIENTS = frozenset({"client"})

# RPCs of each service by who may call them.
_LISTS: dict[str, dict[frozenset[str], str]] = {
    SCHEDULER.name: {
        _ALL: "Ping DescribeCluster",
        _SHARDS: "Register Heartbeat Leave PrepareLeave",
        _READERS: "TakeIncarnation",
        _WRITERS: """CreateClusterTable DropClusterTable PublishClusterTables CheckCaller FenceJob TellJob
            LeaseStreams RenewStreams ReleaseStreams DescribeStreams DescribeHolders RestoreStreams""",
        _CLIENTS: "TellSteps LeaveSteps",
    },
    SHARD.name: {
        _ALL: "Ping",
        _SCHEDULER: "CreateTable DropTable PublishTable",
        _READERS: "Pull OpenDataPlane Describe",
        _WRITERS: "Push Assign Remove Expire ComputeHosted UpdateHosted Freeze WriteFrozen Thaw Restore Fence",
    },
    GRAPH.name: {
        _ALL: "Ping",
        _CLIENTS: """BuildGraph CancelBuild SelectClasses DescribeGraphs DownloadGraph ForgetGraph WriteGraphs
            RestoreGraphs""",
    },
    GEAR.name: {
        _ALL: "Ping",
        _WRITERS: "Features PushFeatureGradients FlushGradients DescribeGear HandOver",
    },
    "grpc.health.v1.Health": {_ALL: "Check List Watch"},
    "grpc.reflection.v1alpha.ServerReflection": {_ALL: "ServerReflectionInfo"},
}
CALLERS: dict[str, frozenset[str]] = {
    f"/{service}/{rpc}": roles
    for service, lists in _LISTS.items()
    for roles, rpcs in lists.items()
    for rpc in rpcs.split()
}
"""Path of an RPC -> the roles that may call it."""
_OF_A_SHARD = {method.path: method for _, method in SCHEDULER.items() if CALLERS[method.path] == _SHARDS}
"""Only ``server/N`` registers, lives and leaves as shard N."""


class Access(grpc.ServerInterceptor):
    """Looks at the caller of every call of a server that has certificates, before anything of the call is done."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._guarded = functools.cache(self._guard)

    def intercept_service(self, continuation: Callable[..., Any], handler_call_details: Any) -> Any:
        """Return what serves the call, if the caller may make it."""
        handler = continuation(handler_call_details)
        return None if handler is None else self._guarded(handler_call_details.method, handler)

    def _guard(self, path: str, handler: Any) -> Any:
        ways = ("stream" if streams else "unary" for streams in (handler.request_streaming, handler.response_streaming))
        arity = "_".join(ways)
        behaviour = getattr(handler, arity)

        @functools.wraps(behaviour)  # its thread pool, too
        def answer(request: Any, context: grpc.ServicerContext, *more: Any) -> Any:
            code = self._refusal(path, request, context)
            if code is not None:
                context.abort(code, "")
            return behaviour(request, context, *more)

        make = getattr(grpc, f"{arity}_rpc_method_handler")
        return make(answer, handler.request_deserializer, handler.response_serializer)

    def _refusal(self, path: str, request: Any, context: grpc.ServicerContext) -> grpc.StatusCode | None:
        """How the call ends, if its caller may not make it."""
        pem: Any = context.auth_context()["x509_pem_cert"][0]
        certified, until = _certificate(pem)
        names = [name for name in certified if name.cluster == self._cluster]
        if time.time() >= until or not names:
            why, code = "its certificate ran out, or is of another cluster", grpc.StatusCode.UNAUTHENTICATED
        elif not (able := [name for name in names if name.role in CALLERS.get(path, ())]):
            why, code = "not its role", grpc.StatusCode.PERMISSION_DENIED
        elif path in _OF_A_SHARD and not {ANY_NUMBER, _shard_of(path, request)}.intersection(n.number for n in able):
            why, code = "another's shard", grpc.StatusCode.PERMISSION_DENIED
        else:
            return None
        logger.warning("refused: %s at %s: %s (%s)", ", ".join(map(str, certified)), context.peer(), path, why)
        return code


def _shard_of(path: str, request: bytes) -> str:
    try:
        return str(_OF_A_SHARD[path].decode(request)[0].shard)
    except GeartrainError:  # which its handler would say
        return ""


@functools.lru_cache(4096)
def _certificate(pem: bytes) -> tuple[tuple[Name, ...], float]:
    from cryptography import x509  # not loaded where nobody has certificates

    certificate = x509.load_pem_x509_certificate(pem)
    return names_of(certificate), certificate.not_valid_after_utc.timestamp()
