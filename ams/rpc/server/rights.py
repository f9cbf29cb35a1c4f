"""Rights that each RPC needs to which tables, read from its request, in this one place.

An RPC in no list needs ``admin`` of all tables. A request that names a job, or a stream of writes, must name the
token's own.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from geartrain.ams.kernels import _core
from geartrain.ams.rpc.services import GEAR, GRAPH, SCHEDULER, SHARD, Method
from geartrain.ams.rpc.tokens import ALL_TABLES, RIGHTS, Token

ANY = "any"
"""Right of every valid token."""
AUDITED_RIGHTS = frozenset({"create", "snapshot", "admin"})
"""Rights whose use is audited even when allowed."""

# RPCs of each service by the right to their tables.
_LISTS: dict[str, dict[str, str]] = {
    SCHEDULER.name: {
        ANY: """DescribeCluster IssueIncarnation CheckCaller FenceJob ReportJob LeaseStreams RenewStreams ReleaseStreams
            DescribeStreams DescribeHolders RestoreStreams ReportSteps LeaveSteps ReadRendezvous
            WriteRendezvous""",
        "read": "ReadEvents DescribeJobs",
        "create": "CreateClusterTable AlterClusterTable DropClusterTable",
        "snapshot": "PublishClusterTables ReportEvent",
    },
    SHARD.name: {
        ANY: "Describe OpenDataPlane Fence",
        "read": "Pull ComputeHosted",
        "write": "Push Assign Remove Expire UpdateHosted",
        "snapshot": "Freeze WriteFrozen Thaw Restore",
    },
    GRAPH.name: {
        ANY: "DescribeGraphs",
        "read": "SelectClasses DownloadGraph",
        "write": "BuildGraph CancelBuild ForgetGraph",
        "snapshot": "WriteGraphs RestoreGraphs",
    },
    GEAR.name: {
        ANY: "DescribeGear",
        "read": "Features",
        "write": "PushFeatureGradients FlushGradients",
        "admin": "HandOver",
    },
}
RIGHT_OF: dict[str, str] = {
    f"/{service}/{rpc}": right
    for service, lists in _LISTS.items()
    for right, rpcs in lists.items()
    for rpc in rpcs.split()
}
"""Right that a client's token must give to an RPC's tables, by path."""
NO_TOKEN = frozenset(
    {f"/{service.name}/Ping" for service in (SCHEDULER, SHARD, GRAPH, GEAR)}
    | {f"/grpc.health.v1.Health/{rpc}" for rpc in ("Check", "List", "Watch")}
    | {"/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"}
)
"""Paths of RPCs that need no token."""
OPENS_ROWS = f"/{SHARD.name}/OpenDataPlane"


def _places(*names: str) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    """Return fields of messages: (first name, function that reads the field)."""
    return tuple((name.partition(".")[0], operator.attrgetter(name)) for name in names)


_TABLES = _places("table", "tables", "spec.name", "name", "event.tables")
"""Fields that name tables; ``name``: the dense part of a slow gear, which is its table's."""
_JOBS = _places("job", "reader.job", "who.job")
_STREAMS = _places("caller.stream", "context.stream", "group.job", "event.job")
"""Which may be of nobody."""
_LEASE = f"/{SCHEDULER.name}/LeaseStreams"
_FREEZE = f"/{SHARD.name}/Freeze"
_OF_A_FREEZE = (_FREEZE, f"/{SHARD.name}/WriteFrozen", f"/{SHARD.name}/Thaw")
_MAX_FREEZES = 65_536


class RequiredRights(NamedTuple):
    """Rights that a request needs."""

    right: str
    tables: tuple[str, ...]
    """Tables it names; empty: none in particular."""
    jobs: tuple[str, ...] = ()
    freeze: str = ""
    """Name of the freeze that the tables are added to."""

    def lacks(self, token: Token, grant: _core.Grant) -> str | None:
        """Return the right that a token lacks; None: none."""
        if self.right != ANY:
            bit = RIGHTS.get(self.right, 0)
            if not self.tables and not any(rights & bit for _, rights in token.rules):
                return f"no right to {self.right}"
            for table in self.tables:
                if not grant.rights(table) & bit:
                    return f"no right to {self.right} {table!r}"
        other = next((job for job in self.jobs if not grant.owns(job)), None)
        return None if other is None else f"{other!r} is of another job than {token.job!r}"


class FreezeTables:
    """Tables of freezes by name, as requests to write or end a freeze do not name its tables."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: dict[str, set[str]] = {}

    def tables(self, freeze: str, more: Iterable[str]) -> tuple[str, ...]:
        """Return all tables of a freeze, together with ``more``."""
        with self._lock:
            return tuple(sorted(self._tables.get(freeze, set()).union(more)))

    def record(self, asked: RequiredRights) -> None:
        """Record an allowed request."""
        with self._lock:
            self._tables[asked.freeze] = {*self._tables.pop(asked.freeze, ()), *asked.tables}
            if len(self._tables) > _MAX_FREEZES:
                del self._tables[next(iter(self._tables))]


class _Reader(NamedTuple):
    """Functions that read an RPC's tables, jobs and streams from its message."""

    header_of: Callable[[bytes], Any]
    right: str
    tables: tuple[Callable[[Any], Any], ...]
    jobs: tuple[Callable[[Any], Any], ...]
    streams: tuple[Callable[[Any], Any], ...]


def _reader(method: Method) -> _Reader:
    right = RIGHT_OF.get(method.path, "admin")
    has = method.fields
    places = [tuple(get for first, get in found if first in has) for found in (_TABLES, _JOBS, _STREAMS)]
    return _Reader(method.header_of, right, () if right == ANY else places[0], *places[1:])


_READERS = {
    method.path: _reader(method) for service in (SCHEDULER, SHARD, GRAPH, GEAR) for _, method in service.items()
}


def asked(path: str, request: bytes, freezes: FreezeTables) -> RequiredRights:
    """Return the rights that a request needs. Raises a GeartrainError for an undecodable one."""
    reader = _READERS.get(path)
    if reader is None:
        return RequiredRights("admin", (ALL_TABLES,))
    message = reader.header_of(request)
    jobs = [get(message) for get in reader.jobs]
    jobs += filter(None, (get(message) for get in reader.streams))
    tables = tuple(name for get in reader.tables for name in _names(get(message)))
    if path == _LEASE and message.HasField("restore"):  # the scheduler will save and restore these tables for it
        return RequiredRights("snapshot", tuple(message.restore.tables) or (ALL_TABLES,), tuple(jobs))
    if path in _OF_A_FREEZE:
        if path == _FREEZE and not tables:
            tables = (ALL_TABLES,)
        freeze = message.snapshot_id
        return RequiredRights(
            reader.right, freezes.tables(freeze, tables), tuple(jobs), freeze if path == _FREEZE else ""
        )
    return RequiredRights(reader.right, tables, tuple(jobs))


def _names(found: Any) -> Iterable[str]:
    """Return the names of tables in a field: one, or several, each a text or a message with one."""
    return (found,) if isinstance(found, str) else (one if isinstance(one, str) else one.table for one in found)
