"""Access control of calls: the roles that may call each RPC, checked by certificate and token.

An RPC in no list is refused. A refusal is logged here, and its caller gets no reason; only callers of a service for all
clients, as of models, get it, as over HTTP.
"""

from __future__ import annotations

import datetime
import functools
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from typing import Any

import grpc

from geartrain.ams.kernels import _core
from geartrain.ams.observe.call_counts import CallCounts
from geartrain.ams.rpc.credentials import ANY_NUMBER, Credentials, Name, names_of
from geartrain.ams.rpc.server.rights import (
    ANY,
    AUDITED_RIGHTS,
    NO_TOKEN,
    OPENS_ROWS,
    RIGHT_OF,
    FreezeTables,
    RequiredRights,
    asked,
)
from geartrain.ams.rpc.server.silent_connections import SilentConnections
from geartrain.ams.rpc.services import GEAR, GRAPH, SCHEDULER, SHARD
from geartrain.ams.rpc.tokens import ALL_TABLES, METADATA_KEY, RIGHTS, SCHEME, Token, Tokens
from geartrain.ams.values.config import CERTIFIED_ROLES, CLIENT
from geartrain.ams.values.errors import AccessDenied, GeartrainError

logger = logging.getLogger(__name__)
auditor = logging.getLogger("geartrain.audit")
"""Audit log: one line of JSON for each refused call, and for each that makes, drops, saves or restores tables."""

GRANT: ContextVar[_core.Grant | None] = ContextVar("grant", default=None)
"""Rights of the row connection that the present call opens; None: all."""

_ALL = frozenset(CERTIFIED_ROLES)
_READERS = frozenset({"client", "slowgear", "graph"})
_WRITERS = frozenset({"client", "slowgear"})
_SHARDS = frozenset({"server"})
_TOKEN_READERS = frozenset({"server", "graph", "slowgear"})
_SCHEDULER = frozenset({"scheduler"})
_CLIENTS = frozenset({"client"})

# RPCs of each service by the roles that may call them.
_LISTS: dict[str, dict[frozenset[str], str]] = {
    SCHEDULER.name: {
        _ALL: "Ping DescribeCluster",
        _SHARDS: "Register Heartbeat Leave PrepareLeave",
        _TOKEN_READERS: "ReadRevoked",
        _READERS | _SCHEDULER: "IssueIncarnation",
        _WRITERS: """AlterClusterTable FenceJob ReportJob LeaseStreams RenewStreams ReleaseStreams DescribeStreams
            DescribeHolders RestoreStreams""",
        _WRITERS | _SCHEDULER: "CreateClusterTable DropClusterTable PublishClusterTables CheckCaller ReportEvent",
        _CLIENTS: "ReportSteps LeaveSteps ReadRendezvous WriteRendezvous",
        _CLIENTS | _SCHEDULER: "ReadEvents DescribeJobs",  # it may be asked where it runs
    },
    SHARD.name: {
        _ALL: "Ping",
        _SCHEDULER: "CreateTable AlterTable DropTable PublishTable",
        _READERS: "Pull OpenDataPlane",
        _READERS | _SCHEDULER: "Describe",
        _WRITERS: "Push Assign Remove Expire ComputeHosted UpdateHosted",
        _WRITERS | _SCHEDULER: "Freeze WriteFrozen Thaw Restore Fence",  # of the jobs that it restores
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
"""Roles that may call an RPC, by its path."""
_MAY_READ, _MAY_ALL = (
    Token("", ALL_TABLES, ((ALL_TABLES, rights),), float("inf")) for rights in (RIGHTS["read"], sum(RIGHTS.values()))
)
Asks = Callable[[bytes], RequiredRights]
"""Function from a request to the rights it needs. Raises a GeartrainError for an undecodable one."""
_OF_A_SHARD = {method.path: method for _, method in SCHEDULER.items() if CALLERS[method.path] == _SHARDS}
"""RPCs that only ``server/N`` may call for shard N: register, heartbeat, leave."""


class Access(grpc.ServerInterceptor):
    """Interceptor that checks the caller of every call to a server with certificates, before any work."""

    def __init__(self, mine: Credentials, folder: str, strangers: SilentConnections, counts: CallCounts) -> None:
        """Refused calls are counted in ``counts``; the handlers count all others."""
        self._mine, self._cluster = mine, mine.names[0].cluster
        self._strangers, self._counts = strangers, counts
        self.tokens = tokens_of(folder)
        self._freezes = FreezeTables()
        self._has_warned = False
        self._asks: dict[str, Asks] = {}
        self._guarded = functools.cache(self._guard)

    def know(self, asks: Mapping[str, Asks]) -> None:
        """Allow every role the calls of these paths, which are in no list."""
        self._asks |= asks

    def intercept_service(self, continuation: Callable[..., Any], handler_call_details: Any) -> Any:
        """Return the handler of the call, with the check in front."""
        handler = continuation(handler_call_details)
        return None if handler is None else self._guarded(handler_call_details.method, handler)

    def _guard(self, path: str, handler: Any) -> Any:
        ways = ("stream" if streams else "unary" for streams in (handler.request_streaming, handler.response_streaming))
        arity = "_".join(ways)
        behaviour = getattr(handler, arity)

        @functools.wraps(behaviour)  # its thread pool, too
        def answer(request: Any, context: grpc.ServicerContext, *more: Any) -> Any:
            code, why, grant = self._looked_at(path, request, context)
            if code is not None:
                self._counts.add(path.rpartition("/")[2], AccessDenied.__name__, 0.0, 0, 0)
                context.abort(code, why if path in self._asks else "")
            if grant is None:
                return behaviour(request, context, *more)
            before = GRANT.set(grant)
            try:
                return behaviour(request, context, *more)
            finally:
                GRANT.reset(before)

        make = getattr(grpc, f"{arity}_rpc_method_handler")
        return make(answer, handler.request_deserializer, handler.response_serializer)

    def _looked_at(
        self, path: str, request: Any, context: grpc.ServicerContext
    ) -> tuple[grpc.StatusCode | None, str, _core.Grant | None]:
        """Return the status and reason of a refusal, or the rights of the row connection that the call opens."""
        is_audited = False
        self._strangers.called(context.peer())
        shown: Any = context.auth_context()
        pem, chain = shown["x509_pem_cert"][0], shown.get("x509_pem_cert_chain", (b"",))[0]
        certified, until = _certificate(pem)
        names = [name for name in certified if name.cluster == self._cluster]
        if time.time() >= until or not names:
            why, code = "its certificate ran out, or is of another cluster", grpc.StatusCode.UNAUTHENTICATED
        elif not self._mine.trusts(pem, chain):
            why, code = "its certificate is of an authority that is no longer trusted", grpc.StatusCode.UNAUTHENTICATED
        elif not (able := [name for name in names if path in self._asks or name.role in CALLERS.get(path, ())]):
            why, code = "not its role", grpc.StatusCode.PERMISSION_DENIED
        elif path in _OF_A_SHARD and not {ANY_NUMBER, _shard_of(path, request)}.intersection(n.number for n in able):
            why, code = "another's shard", grpc.StatusCode.PERMISSION_DENIED
        elif path in NO_TOKEN:
            return None, "", None
        else:
            is_program = all(name.role == CLIENT for name in able)
            caller = {"caller": ", ".join(map(str, certified)), "peer": context.peer()}
            text = _shown_token(context) if is_program else ""
            if text and not self._has_warned and not self.tokens.are_wanted:
                self._has_warned = True
                logger.warning(
                    "%s shows a token, which limits nothing: there is no token.pub in security.folder of this role; "
                    "copy it there from where the token was made ('geartrain certs renew')",
                    caller["peer"],
                )
            token = self._by_token(path, request, text, caller, needs=is_program)
            if not isinstance(token, str):
                if path != OPENS_ROWS:
                    return None, "", None
                grant = (token or (_MAY_ALL if any(n.role in _WRITERS for n in able) else _MAY_READ)).grant(until)

                def is_good() -> bool:
                    if not self._mine.trusts(pem, chain):
                        return False
                    if token is None:
                        return not (is_program and self.tokens.are_wanted)
                    return not isinstance(self.tokens.trusted(text), str)

                self.tokens.watch(grant, is_good, caller)
                return None, "", grant
            why, code, is_audited = token, grpc.StatusCode.PERMISSION_DENIED, True
        who = ", ".join(map(str, certified))
        if not is_audited:
            audit({"caller": who, "peer": context.peer()}, path, (), why)
        logger.warning("refused: %s at %s: %s (%s)", who, context.peer(), path, why)
        return code, why, None

    def _by_token(
        self, path: str, request: Any, text: str, caller: dict[str, Any], *, needs: bool
    ) -> Token | str | None:
        """Return the token of the call (None: its certificate alone counts), or the reason of the refusal.

        A program ``needs`` a token once there are token keys: its token defines its rights.
        """
        token = None
        is_wanted = needs and self.tokens.are_wanted
        if not (is_wanted or RIGHT_OF.get(path) in AUDITED_RIGHTS):
            what = RequiredRights(ANY, ())
        else:
            try:
                asks = self._asks.get(path)
                what = asked(path, request, self._freezes) if asks is None else asks(request)
            except GeartrainError:  # its handler reports it, to callers that may call it at all
                what = RequiredRights("admin", (ALL_TABLES,))
        why = None
        if is_wanted:
            trusted = self.tokens.trusted(text) if text else "it shows no token"
            if isinstance(trusted, str):
                why = trusted
            else:
                token = trusted[0]
                caller |= {"token": token.id, "job": token.job}
                why = what.lacks(*trusted)
        if why is None and what.freeze:
            self._freezes.record(what)
        if why is not None or what.right in AUDITED_RIGHTS:
            audit(caller, path, what.tables, why)
        return token if why is None else why


def _shown_token(context: grpc.ServicerContext) -> str:
    metadata: Any = context.invocation_metadata()
    shown = next((value for key, value in metadata if key == METADATA_KEY), "")
    return shown.removeprefix(SCHEME) if isinstance(shown, str) and shown.startswith(SCHEME) else ""


def audit(caller: dict[str, Any], path: str, tables: Iterable[str], refusal: str | None, **more: Any) -> None:
    """Write a line to the audit log: caller, RPC, tables, whether it was refused and why."""
    line = {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        **caller,
        "rpc": path,
        "tables": list(tables),
        "allowed": refusal is None,
        "reason": refusal or "",
        **more,
    }
    auditor.log(logging.INFO if refusal is None else logging.WARNING, "%s", json.dumps(line))


@functools.cache
def tokens_of(folder: str) -> Tokens:
    """Return the tokens of a folder of certificates, one instance a process."""
    return Tokens(folder, audit)


def _shard_of(path: str, request: bytes) -> str:
    try:
        return str(_OF_A_SHARD[path].decode(request)[0].shard)
    except GeartrainError:  # its handler would report it
        return ""


@functools.lru_cache(4096)
def _certificate(pem: bytes) -> tuple[tuple[Name, ...], float]:
    from cryptography import x509  # imported only where there are certificates

    certificate = x509.load_pem_x509_certificate(pem)
    return names_of(certificate), certificate.not_valid_after_utc.timestamp()
