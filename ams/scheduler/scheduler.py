"""The scheduler's decisions, without sockets: who is in the cluster and which tables it has.

A table is intact while every shard is still the incarnation that made it. When a shard comes back empty the table is
not, and says so until somebody drops it: rows are never replaced by initial values behind a user's back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from geartrain.ams.errors import (
    ClusterNotReady,
    ConfigError,
    GeartrainError,
    InvalidArgument,
    ShardRestarted,
    ShardUnavailable,
    SpecMismatch,
    TableExists,
)
from geartrain.ams.messages import CallContext, CreateTable, DropTable, Request
from geartrain.ams.placement import MAX_SHARDS, even_placement
from geartrain.ams.specs import TableSpec
from geartrain.ams.transport.carrier import AttemptFailed, ClusterView, ShardCarrier, ShardEntry
from geartrain.ams.words import counted

_SHARD_TIMEOUT_SECONDS = 30.0


@dataclass
class _Member:
    address: str
    incarnation: int
    last_heartbeat: float
    left: bool = False
    newcomer: bool = True
    """Joined without a past: it holds no rows that an earlier scheduler knew of."""


@dataclass
class _Schema:
    spec: TableSpec
    holders: dict[int, int] = field(default_factory=dict)
    """Incarnation of each shard that holds the table."""


@dataclass(frozen=True)
class Registration:
    """What a shard learns when it joins."""

    shard: int
    num_shards: int
    cluster_version: int


@dataclass(frozen=True)
class Beat:
    """What a shard learns from a heartbeat."""

    cluster_version: int
    unknown: bool = False
    """The scheduler was restarted: register again."""
    replaced: bool = False
    """Another process holds the shard now."""


class Scheduler:
    """Membership, cluster version and schemas. Thread-safe."""

    def __init__(
        self,
        num_shards: int,
        open_carrier: Callable[[str], ShardCarrier],
        *,
        lease_seconds: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not 1 <= num_shards <= MAX_SHARDS:
            raise ConfigError(f"num_shards is {num_shards}; it must lie in [1, {MAX_SHARDS}]")
        self._num_shards = num_shards
        self._open_carrier = open_carrier
        self.lease_seconds = lease_seconds
        self._clock = clock
        self._cluster_version = 1
        self._members: dict[int, _Member] = {}
        self._schemas: dict[str, _Schema] = {}
        self._bucket_shards = even_placement(num_shards)
        self._ran: float | None = None
        """When :meth:`pulse` was last called."""
        self._lock = threading.Lock()
        self._schema_change = threading.Lock()

    def pulse(self) -> None:
        """Note that the scheduler runs. To be called several times a lease, or never."""
        with self._lock:
            self._forgive_own_stop()
            self._ran = self._clock()

    def register(
        self,
        address: str,
        shard: int | None,
        incarnation: int,
        *,
        cluster_version: int = 0,
        tables: Sequence[TableSpec] = (),
    ) -> Registration:
        """Take a shard into the cluster, or take back one that knew an earlier scheduler.

        Raises ConfigError if the shard asked for, or every shard, is held by a living process.
        """
        with self._lock:
            self._forgive_own_stop()
            if shard is None:
                chosen = self._free_shard(address, incarnation)
            else:
                chosen = self._claim(shard, address, incarnation, has_past=cluster_version > 0)
            previous = self._members.get(chosen)
            self._cluster_version = max(self._cluster_version, cluster_version)
            if previous is not None and previous.incarnation != incarnation:
                self._cluster_version += 1
            self._members[chosen] = _Member(address, incarnation, self._clock(), newcomer=cluster_version == 0)
            for spec in tables:
                schema = self._schemas.setdefault(spec.name, _Schema(spec))
                if schema.spec == spec:
                    schema.holders[chosen] = incarnation
            return Registration(chosen, self._num_shards, self._cluster_version)

    def heartbeat(self, shard: int, incarnation: int) -> Beat:
        """Note that a shard lives."""
        with self._lock:
            member = self._members.get(shard)
            if member is None:
                return Beat(self._cluster_version, unknown=True)
            if member.incarnation != incarnation:
                return Beat(self._cluster_version, replaced=True)
            member.last_heartbeat = self._clock()
            member.left = False
            return Beat(self._cluster_version)

    def leave(self, shard: int, incarnation: int) -> None:
        """Note that a shard goes in good order; its place is free at once."""
        with self._lock:
            member = self._members.get(shard)
            if member is not None and member.incarnation == incarnation:
                member.left = True

    def describe(self) -> ClusterView:
        """Return the cluster as it is now."""
        with self._lock:
            return self._view()

    def create_table(self, spec: TableSpec, *, reuse: bool = False) -> bool:
        """Make a table on every shard; return whether it existed.

        Raises TableExists, SpecMismatch (reuse of a different table), ShardRestarted (reuse of one that lost rows),
        ClusterNotReady or ShardUnavailable; then no shard keeps it.
        """
        with self._schema_change:
            view = self._ready_view()
            with self._lock:
                existing = self._schemas.get(spec.name)
            if existing is not None:
                self._check_reuse(existing, spec, reuse, view)
                return True
            try:
                self._on_all_shards(view, CreateTable(spec=spec))
            except (GeartrainError, AttemptFailed):
                self._on_all_shards(view, DropTable(table=spec.name), best_effort=True)
                raise
            with self._lock:
                self._schemas[spec.name] = _Schema(spec, {entry.shard: entry.incarnation for entry in view.shards})
            return False

    def drop_table(self, name: str) -> None:
        """Remove a table from every shard. Idempotent."""
        with self._schema_change:
            self._on_all_shards(self._ready_view(), DropTable(table=name))
            with self._lock:
                self._schemas.pop(name, None)

    def _forgive_own_stop(self) -> None:
        """After a stop of the scheduler itself every shard has a whole lease again: nobody could hear it."""
        now = self._clock()
        if self._ran is not None and now - self._ran > self.lease_seconds / 2:
            self._ran = now
            for member in self._members.values():
                member.last_heartbeat = now

    def _claim(self, shard: int, address: str, incarnation: int, *, has_past: bool) -> int:
        if not 0 <= shard < self._num_shards:
            raise InvalidArgument(f"shard {shard} does not exist; this cluster has shards 0 … {self._num_shards - 1}")
        # After a restart of the scheduler a newcomer may be given the number of a shard that still holds its rows.
        if has_past and self._is_empty_newcomer(shard):
            return shard
        if not self._is_free(shard, address, incarnation):
            raise ConfigError(f"shard {shard} is held by a living process at {self._members[shard].address}")
        return shard

    def _is_empty_newcomer(self, shard: int) -> bool:
        member = self._members.get(shard)
        if member is None or not member.newcomer:
            return False
        return all(schema.holders.get(shard) != member.incarnation for schema in self._schemas.values())

    def _free_shard(self, address: str, incarnation: int) -> int:
        shards = range(self._num_shards)
        same = [s for s in shards if s in self._members and self._members[s].address == address]
        candidates: list[int] = [*same, *(s for s in shards if s not in self._members), *shards]
        for shard in candidates:
            if self._is_free(shard, address, incarnation):
                return shard
        raise ConfigError(
            f"this cluster has {counted(self._num_shards, 'shard')}, all held by living processes; "
            f"a dead one's shard is free {self.lease_seconds:g} s after its last sign of life"
        )

    def _is_free(self, shard: int, address: str, incarnation: int) -> bool:
        member = self._members.get(shard)
        if member is None or member.left or member.incarnation == incarnation or member.address == address:
            return True
        return bool(self._clock() - member.last_heartbeat > self.lease_seconds)

    def _view(self) -> ClusterView:
        now = self._clock()
        entries = []
        for shard in range(self._num_shards):
            member = self._members.get(shard)
            if member is None:
                entries.append(
                    ShardEntry(shard=shard, address="", incarnation=0, state="missing", heartbeat_age_seconds=0.0)
                )
                continue
            age = now - member.last_heartbeat
            entries.append(
                ShardEntry(
                    shard=shard,
                    address=member.address,
                    incarnation=member.incarnation,
                    state="lost" if member.left or age > self.lease_seconds else "up",
                    heartbeat_age_seconds=age,
                )
            )
        incarnations = {entry.shard: entry.incarnation for entry in entries}
        return ClusterView(
            cluster_version=self._cluster_version,
            num_shards=self._num_shards,
            ready=all(entry.state == "up" for entry in entries),
            shards=tuple(entries),
            tables=tuple(schema.spec for schema in self._schemas.values() if schema.holders == incarnations),
            bucket_shards=self._bucket_shards,
        )

    def _ready_view(self) -> ClusterView:
        view = self.describe()
        absent = [f"{entry.shard} ({entry.state})" for entry in view.shards if entry.state != "up"]
        if absent:
            raise ClusterNotReady(f"shards {', '.join(absent)} of {view.num_shards} are not up; start their servers")
        return view

    @staticmethod
    def _check_reuse(existing: _Schema, spec: TableSpec, reuse: bool, view: ClusterView) -> None:
        if not reuse:
            raise TableExists(
                f"table {spec.name!r} exists; pass reuse=True to go on with its rows, drop it, or choose another name"
            )
        if existing.spec != spec:
            raise SpecMismatch(f"table {spec.name!r} exists as {existing.spec}, not as {spec}")
        lost = [entry.shard for entry in view.shards if existing.holders.get(entry.shard) != entry.incarnation]
        if lost:
            raise ShardRestarted(
                f"table {spec.name!r} lost its rows on shards {lost}, which were restarted; drop it and create it anew"
            )

    def _on_all_shards(self, view: ClusterView, request: Request, *, best_effort: bool = False) -> None:
        for entry in view.shards:
            carrier = self._open_carrier(entry.address)
            context = CallContext(shard_incarnation=entry.incarnation)
            try:
                carrier.submit(context, request, _SHARD_TIMEOUT_SECONDS).result()
            except AttemptFailed as exc:
                if not best_effort:
                    raise ShardUnavailable(f"shard {entry.shard} cannot be told of the table: {exc}") from exc
            except GeartrainError:
                if not best_effort:
                    raise
            finally:
                carrier.close()
