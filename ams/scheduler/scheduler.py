"""Decisions of the scheduler, without sockets: the members and tables of the cluster.

A table is complete while every shard is still the incarnation that made it. When a shard comes back empty the table is
incomplete until it is dropped: rows are never silently replaced by initial values.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from geartrain.ams.observe import failpoints
from geartrain.ams.observe.event_log import EventLog
from geartrain.ams.rpc.carrier import AttemptFailed, ShardCarrier
from geartrain.ams.scheduler.broadcast import broadcast
from geartrain.ams.scheduler.incarnations import MAX_GIVEN, Incarnations
from geartrain.ams.scheduler.membership import Membership, ShardEvents
from geartrain.ams.scheduler.state import Member, Schema, State
from geartrain.ams.storage.kv.store import KeyValueStore, MemoryStore
from geartrain.ams.values.errors import (
    ClusterNotReady,
    ConfigError,
    GeartrainError,
    InvalidArgument,
    OutOfMemory,
    ShardHeld,
    ShardRestarted,
    SpecMismatch,
    StaleBucketMap,
    TableExists,
    TableNotFound,
    being_restored,
)
from geartrain.ams.values.placement import MAX_SHARDS, BucketMap
from geartrain.ams.values.scheduler_messages import ClusterEvent, ClusterView, HeartbeatResult, Registration, ShardEntry
from geartrain.ams.values.shard_messages import AlterTable, CreateTable, DropTable, PublishTable
from geartrain.ams.values.specs import SETTINGS, TableSpec
from geartrain.ams.values.text import counted

_NAMED = 8
_LONGEST_VERSION = 50


class Scheduler:
    """Membership, cluster version and schemas. Thread-safe."""

    def __init__(
        self,
        num_shards: int,
        open_carrier: Callable[[str, int], ShardCarrier],
        *,
        lease_seconds: float = 10.0,
        store: KeyValueStore | None = None,
        clock: Callable[[], float] = time.monotonic,
        incarnations: Incarnations | None = None,
        incarnations_at: Callable[[str], Collection[int]] = lambda _: (0,),
        events: EventLog | None = None,
    ) -> None:
        """Load the state in ``store`` (None: nothing is stored); number tables by ``incarnations``, shared with data
        streams (None: those of the store). ``incarnations_at`` queries the processes at an address (by default only the
        one that registers), and raises AttemptFailed if they do not answer. Changes of shards and tables are recorded
        in ``events``.

        Raises ConfigError (another number of shards, a newer format), StateDamaged.
        """
        if not isinstance(num_shards, int) or not 1 <= num_shards <= MAX_SHARDS:
            raise ConfigError(f"num_shards is {num_shards!r}; it must be an integer in [1, {MAX_SHARDS}]")
        self._num_shards = num_shards
        self._open_carrier = open_carrier
        self.lease_seconds = lease_seconds
        self._clock = clock
        self._incarnations_at = incarnations_at
        self._asking = threading.Lock()
        store = MemoryStore() if store is None else store
        self._state = State(store, num_shards)
        self.was_restarted = bool(self._state.members)
        """Whether an earlier scheduler of this cluster existed, from which jobs may be unheard."""
        self._incarnations = Incarnations(store) if incarnations is None else incarnations
        for schema in self._state.schemas.values():
            self._incarnations.record_seen(schema.spec.incarnation)
        self._membership = Membership(self._state, num_shards, lease_seconds, clock)
        self.events = EventLog() if events is None else events
        """Log of the changes of shards and tables."""
        self.shard_events = ShardEvents(self.events)
        knows = f"knows {counted(len(self._state.members), 'shard')} and {counted(len(self._state.schemas), 'table')}"
        begun = f"the scheduler of {counted(num_shards, 'shard')} began; from before it {knows}"
        self.events.append(ClusterEvent(kind="scheduler", text=begun))
        self._lock = threading.Lock()
        self._schema_change = threading.Lock()
        self._changing: tuple[str, ...] = ()
        """Tables that are being made, published or dropped."""

    def pulse(self) -> None:
        """Record that the scheduler runs. To be called several times a lease, on the threads that answer heartbeats, so
        that it is late when they are; or never.
        """
        with self._lock:
            self._membership.pulse()
            self.shard_events.update(self._membership.entries())

    def register(
        self,
        address: str,
        shard: int | None,
        incarnation: int,
        *,
        cluster_version: int = 0,
        heartbeat_seconds: float = 0.0,
        tables: Sequence[TableSpec] = (),
        restoring_tables: Collection[str] = (),
        bucket_map: BucketMap | None = None,
    ) -> Registration:
        """Admit a shard to the cluster, or readmit one of an earlier scheduler.

        ``heartbeat_seconds`` is its intended heartbeat interval, ``restoring_tables`` are those of its ``tables`` that
        are being restored, ``bucket_map`` is the one it was given. Raises ShardHeld if a live process holds the shard
        it asks for, or every shard; ClusterNotReady if that is not known yet; InvalidArgument if a number is out of
        range; StaleBucketMap if its bucket map is not the cluster's.
        """
        failpoints.reach("scheduler.register.before")
        self._check_numbers(incarnation, cluster_version, heartbeat_seconds)
        gone = self._gone_from(address, shard, incarnation)
        with self._lock:
            if cluster_version > 0:
                self._check_map(bucket_map)
                self.was_restarted = True
            self._membership.notice_own_stop()
            chosen = self._membership.choose(shard, address, incarnation, has_past=cluster_version > 0, gone=gone)
            previous = self._state.members.get(chosen)
            lived = not self._membership.is_free(chosen, incarnation, gone)
            version = max(self._state.cluster_version, cluster_version)
            if previous is not None and previous.incarnation != incarnation:
                failpoints.reach("scheduler.version.before")
                version += 1
            member = Member(
                address,
                incarnation,
                newcomer=cluster_version == 0,
                last_heartbeat=self._clock(),
                heartbeat_seconds=heartbeat_seconds,
            )
            self._state.commit(
                cluster_version=version,
                members={chosen: member},
                schemas=self._held(chosen, incarnation, tables, restoring_tables),
            )
            if previous is not None and previous.incarnation != incarnation:
                failpoints.reach("scheduler.version.after")
            self.shard_events.joined(chosen, member, previous, lived=lived)
            return Registration(
                shard=chosen,
                num_shards=self._num_shards,
                cluster_version=version,
                lease_seconds=self.lease_seconds,
                bucket_map=self._state.bucket_map,
                highest_incarnation=self._incarnations.last,
            )

    def _gone_from(self, address: str, shard: int | None, incarnation: int) -> int | None:
        """Return the incarnation that had a newcomer's address and has ended; None: there was none.

        A process that died and was restarted need not wait for its own lease. But two processes may have one address by
        mistake, as two containers of one name have: so the old one is queried first. Raises ShardHeld if it answers,
        ClusterNotReady if that is not known.
        """
        with self._lock:
            self._membership.notice_own_stop()
            holder = self._membership.holder_at(address, shard, incarnation)
        if holder is None:
            return None
        unknown = f"whether the process that held a shard at {address} lives is not known yet: "
        if not self._asking.acquire(blocking=False):  # the threads that would wait here answer heartbeats
            raise ClusterNotReady(f"{unknown}another one is being asked; try again")
        try:
            found = self._incarnations_at(address)
        except AttemptFailed as exc:
            raise ClusterNotReady(f"{unknown}{exc}; it is free {self.lease_seconds:g} s after its last sign") from None
        finally:
            self._asking.release()
        if holder in found:
            raise ShardHeld(
                f"another process serves a shard at {address}, and answers: give each server an address of its own "
                "(--advertise, or the name of its container), or end that one"
            )
        if not found:
            raise ClusterNotReady(
                f"{unknown}nobody answers there; it is free {self.lease_seconds:g} s after its last sign of life"
            )
        return holder

    def _check_numbers(self, incarnation: int, cluster_version: int, heartbeat_seconds: float) -> None:
        """Raise InvalidArgument for a shard's numbers that leave no room to count on."""
        if not 1 <= incarnation < 2**63:
            raise InvalidArgument(f"incarnation of the shard is {incarnation}; it must be from 1 to 2^63 - 1")
        if cluster_version > max(MAX_GIVEN, self._state.cluster_version):
            raise InvalidArgument(
                f"cluster_version is {cluster_version}; it must be at most 2^62 ({MAX_GIVEN}). This scheduler is at "
                f"{self._state.cluster_version}. Start the shard's server anew"
            )
        if not 0 <= heartbeat_seconds < math.inf:
            raise InvalidArgument(f"heartbeat_seconds is {heartbeat_seconds}; it must be a number of seconds, or 0")

    def _check_map(self, held: BucketMap | None) -> None:
        """Raise StaleBucketMap for a shard of a cluster with another bucket map."""
        if held is None or not held.is_as(self._state.bucket_map):
            theirs = "a bucket map that it does not tell" if held is None else f"version {held.version} of a bucket map"
            raise StaleBucketMap(
                f"the shard holds its rows by {theirs}, which is not version {self._state.bucket_map.version} of this "
                f"cluster of {counted(self._num_shards, 'shard')}; start the scheduler with the data folder and "
                "num_shards that it had, or start the server anew and restore a snapshot"
            )

    def _held(
        self, shard: int, incarnation: int, tables: Sequence[TableSpec], restoring: Collection[str]
    ) -> dict[str, Schema]:
        """Return the schemas updated with the tables that a shard reports.

        Skips a table that no scheduler can have numbered: it was made there directly, and must not keep the shard out.
        """
        changed = {}
        for spec in tables:
            if not self._incarnations.record_seen(spec.incarnation):
                continue
            schema = self._state.schemas.get(spec.name, Schema(spec))
            if schema.spec.is_same_table(spec) and schema.spec.incarnation == spec.incarnation:
                if spec.altered > schema.spec.altered:  # by an earlier scheduler without a store
                    schema = dataclasses.replace(schema, spec=spec)
                # A scheduler without a store learns from the shards alone which tables are unpublished. One that knew
                # all holders of a settled table has published it, perhaps while the shard wrote this.
                if spec.name in restoring and len(schema.holders) < self._num_shards:
                    schema = dataclasses.replace(schema, is_unsettled=True, for_restore=True)
                changed[spec.name] = dataclasses.replace(schema, holders=schema.holders | {shard: incarnation})
        return changed

    def heartbeat(
        self, shard: int, incarnation: int, memory_pool: str = "", *, unix_seconds: float = 0.0, build: str = ""
    ) -> HeartbeatResult:
        """Record a shard's heartbeat, memory pool, clock and version of Geartrain."""
        with self._lock:
            version = self._state.cluster_version
            member = self._state.members.get(shard)
            if member is None:
                return HeartbeatResult(cluster_version=version, unknown=True)
            if member.incarnation != incarnation:
                self.shard_events.record_late_heartbeat(shard, member, incarnation)
                return HeartbeatResult(cluster_version=version, replaced=True)
            if member.left:
                self._state.commit(members={shard: dataclasses.replace(member, left=False)})
                member = self._state.members[shard]
            now = self._clock()
            self.shard_events.record_heartbeat(shard, member, now - member.last_heartbeat)
            member.last_heartbeat = now
            member.has_heartbeat = True
            member.memory_pool, member.version = memory_pool, build[:_LONGEST_VERSION]
            member.clock_ahead_seconds = unix_seconds - time.time() if unix_seconds else 0.0
            return HeartbeatResult(
                pool_shards=self._membership.live_in(memory_pool),
                cluster_version=version,
                highest_incarnation=self._incarnations.last,
                pause_seconds=self._membership.pause_seconds,
            )

    def leave(self, shard: int, incarnation: int) -> None:
        """Record that a shard leaves in order; its place is free at once."""
        with self._lock:
            member = self._state.members.get(shard)
            if member is not None and member.incarnation == incarnation:
                self._state.commit(members={shard: dataclasses.replace(member, left=True)})
                self.shard_events.left(shard, member)

    def members(self) -> dict[int, Member]:
        """Return the holder of each shard."""
        with self._lock:
            return dict(self._state.members)

    def prepare_leave(self, shard: int, incarnation: int) -> None:
        """Record that a shard is shutting down: the cluster is not ready until another takes its place."""
        with self._lock:
            member = self._state.members.get(shard)
            if member is not None and member.incarnation == incarnation and not member.is_leaving:
                member.is_leaving = True
                self.shard_events.leaves(shard, member)

    def leaving_shards(self) -> tuple[int, ...]:
        """Return shards that are shutting down, and have not left yet."""
        with self._lock:
            wanted = sorted(shard for shard, member in self._state.members.items() if member.is_leaving)
            return tuple(shard for shard in wanted if self._membership.entry(shard).state == "leaving")

    def issue_incarnation(self, chosen: int = 0) -> int:
        """Return a new incarnation for a job or stream, higher than all before; or ``chosen`` if it is not 0, above
        which later ones are then assigned.

        Raises InvalidArgument (``chosen`` leaves no room), ClusterNotReady (a restarted scheduler does not know what a
        shard has seen before that has registered).
        """
        if chosen:
            self._incarnations.record_chosen("incarnation", chosen)
            return chosen
        self.describe().require_registered("which incarnations were used")
        return self._incarnations.next()

    def record_incarnation(self, highest: int) -> None:
        """Record the highest incarnation that a shard has seen."""
        self._incarnations.record_seen(highest)

    def describe(self) -> ClusterView:
        """Return the cluster as it is now."""
        with self._lock:
            self._membership.notice_own_stop()
            return self._view()

    def readiness(self) -> dict[str, bool]:
        """Return the readiness of the cluster, by names of health services."""
        view = self.describe()
        found = {
            "shards": view.ready,
            "complete": set(view.incomplete_tables) <= set(view.restoring_tables),
            "restored": not view.restoring_tables,
        }
        return {**found, "ready": all(found.values())}

    def create_table(
        self,
        spec: TableSpec,
        *,
        reuse: bool = False,
        require_current: Callable[[], None] = lambda: None,
        for_restore: bool = False,
        replace: bool = False,
    ) -> TableSpec:
        """Create a table on every shard, and number it, unless it exists; return its spec with its incarnation.

        ``require_current`` raises if the caller was superseded; a change that it let pass is over before the next
        begins, so that a successor's is never undone. A table ``for_restore`` cannot be opened, read or written before
        :meth:`publish_tables`; it replaces the remains of another restore of the name, whether that still runs or not,
        and with ``replace`` any table; if it is the same table, it inherits the altered settings. Raises TableExists,
        TableBeingRestored, SpecMismatch (reuse of a table that differs in more than settings), ShardRestarted (reuse of
        one that lost rows), ClusterNotReady or ShardUnavailable; then no shard keeps it.
        """
        if reuse and (made := self._existing(spec, require_current)) is not None:
            return made
        with self._change_of(spec.name):
            require_current()
            view = self._ready_view()
            with self._lock:
                existing = self._state.schemas.get(spec.name)
            if existing is not None and not existing.is_unsettled and not (for_restore and replace):
                self._check_reuse(existing, spec, reuse, view)
                return existing.spec
            if existing is not None and existing.for_restore and not for_restore:
                raise being_restored(spec.name)
            if for_restore and existing is not None and spec.is_same_table(existing.spec):
                spec = spec.with_settings(existing.spec)
            spec = dataclasses.replace(spec, incarnation=self._incarnations.next())
            # First, so that no client opens the dropped table, nor creates another meanwhile.
            self._store_schema(spec.name, Schema(spec, is_unsettled=True, for_restore=for_restore))
            if existing is not None:  # to be replaced, or of a change that was cut off: some shards may hold it
                broadcast(self._open_carrier, view.shards, self._drop_of(existing, view))
            try:
                failpoints.reach("table.create.before")
                broadcast(self._open_carrier, view.shards, CreateTable(spec=spec, for_restore=for_restore))
                failpoints.reach("table.create.after")
            except (GeartrainError, AttemptFailed):
                undo = DropTable(table=spec.name, incarnation=spec.incarnation)
                if broadcast(self._open_carrier, view.shards, undo, best_effort=True):
                    self._store_schema(spec.name, None)
                raise
            holders = {entry.shard: entry.incarnation for entry in view.shards}
            self._store_schema(spec.name, Schema(spec, holders, is_unsettled=for_restore, for_restore=for_restore))
            if not for_restore:
                self._record_tables("made", spec)
            return spec

    def _existing(self, spec: TableSpec, require_current: Callable[[], None]) -> TableSpec | None:
        """Return the table to reuse; None if it does not exist or is unsettled. Waits for no change of another
        table."""
        with self._lock:
            existing = self._state.schemas.get(spec.name)
        if existing is None or existing.is_unsettled:
            return None
        require_current()
        self._check_reuse(existing, spec, True, self._ready_view())
        return existing.spec

    def alter_table(
        self, wanted: TableSpec, settings: Collection[str], *, require_current: Callable[[], None] = lambda: None
    ) -> TableSpec:
        """Set ``settings`` of a table to those of ``wanted`` on every shard; return its present spec.

        Nothing changes if a shard would refuse them. Then they are stored, so that a shard that cannot be reached does
        not undo them: opening the table, or a restore in its place, uses them, and the same call again reaches all
        shards. If a shard lacks the memory, all get their former settings; if one has been frozen meanwhile, and its
        snapshot cannot hold both, that is given up. The cluster version rises, by which clients learn of it. Raises
        TableNotFound, SpecMismatch, InvalidArgument, OutOfMemory, Busy (a shard writes such a snapshot),
        ShardRestarted, ClusterNotReady, ShardUnavailable.
        """
        name = wanted.name
        if unknown := set(settings).difference(SETTINGS):
            raise InvalidArgument(f"{min(unknown)!r} of a table cannot be altered; {', '.join(SETTINGS)} can")
        with self._change_of(name):
            require_current()
            view = self._ready_view()
            with self._lock:
                existing = self._state.schemas.get(name)
            if existing is not None and existing.for_restore:
                raise being_restored(name)
            if existing is None or existing.is_unsettled:
                raise TableNotFound(
                    f"there is no table {name!r}, or its creation or drop was cut off; drop it and create it again"
                )
            self._check_reuse(existing, wanted, True, view)
            if "optimizer" in settings:
                existing.spec.optimizer.scalars_of_push(wanted.optimizer)
            before, altered = existing.spec, existing.spec.with_settings(wanted, settings)
            asked = dataclasses.replace(altered, altered=view.cluster_version + 1)
            broadcast(self._open_carrier, view.shards, AlterTable(spec=asked, dry_run=True))
            altered = self._store_altered(existing, altered)
            try:
                broadcast(self._open_carrier, view.shards, AlterTable(spec=altered))
            except (InvalidArgument, OutOfMemory):
                back = self._store_altered(existing, before)
                broadcast(self._open_carrier, view.shards, AlterTable(spec=back), best_effort=True)
                raise
            if altered != before:
                self._record_tables(f"altered: {altered.unlike(before)}", altered)
            return altered

    def _store_altered(self, schema: Schema, spec: TableSpec) -> TableSpec:
        with self._lock:
            version = self._state.cluster_version + 1
            spec = dataclasses.replace(spec, altered=version)
            schemas = {spec.name: dataclasses.replace(schema, spec=spec)}
            self._state.commit(cluster_version=version, schemas=schemas)
        return spec

    def publish_tables(self, tables: Mapping[str, int], *, require_current: Callable[[], None] = lambda: None) -> None:
        """Open tables made ``for_restore``, by name with their incarnations, all at once. Idempotent.

        ``require_current`` is as in :meth:`create_table`. If it is cut off, all stay as they were. Raises TableNotFound
        (one was dropped, or another restore replaced it), ShardRestarted (rows of one were lost),
        ClusterNotReady, ShardUnavailable.
        """
        with self._change_of(*tables):
            require_current()
            view = self._ready_view()
            with self._lock:
                schemas = {name: self._state.schemas.get(name) for name in tables}
            held = {entry.shard: entry.incarnation for entry in view.shards}
            published = {}
            for name, schema in schemas.items():
                if schema is None or schema.spec.incarnation != tables[name]:
                    raise TableNotFound(
                        f"table {name!r} was dropped while it was restored, or another restore took its place; restore "
                        "it again"
                    )
                if schema.holders != held:
                    lost = [shard for shard in held if schema.holders.get(shard) != held[shard]]
                    raise ShardRestarted(f"table {name!r} lost rows on shards {lost} while it was restored; try again")
                if schema.is_unsettled:
                    published[name] = Schema(schema.spec, schema.holders)
            failpoints.reach("table.publish.before")
            for name in published:
                broadcast(self._open_carrier, view.shards, PublishTable(table=name, incarnation=tables[name]))
            failpoints.reach("table.publish.after")
            with self._lock:
                self._state.commit(schemas=published)
            if published:
                self._record_tables("opened with restored rows", *(schema.spec for schema in published.values()))

    def drop_table(
        self, name: str, *, incarnation: int = 0, require_current: Callable[[], None] = lambda: None
    ) -> None:
        """Remove a table from every shard, only if its incarnation is ``incarnation`` (0: any). Idempotent.

        ``require_current`` is as in :meth:`create_table`.
        """
        with self._change_of(name):
            require_current()
            view = self._ready_view()
            with self._lock:
                existing = self._state.schemas.get(name)
            if incarnation and (existing is None or existing.spec.incarnation != incarnation):
                return
            drop = DropTable(table=name)
            if existing is not None:
                drop = self._drop_of(existing, view)
                self._store_schema(name, dataclasses.replace(existing, is_unsettled=True))
            broadcast(self._open_carrier, view.shards, drop)
            if existing is not None:
                self._store_schema(name, None)
                self._record_tables("dropped", existing.spec)

    @staticmethod
    def _drop_of(existing: Schema, view: ClusterView) -> DropTable:
        """Return the request that drops a table: by incarnation if every shard has that one, else whichever they
        have."""
        held = {entry.shard: entry.incarnation for entry in view.shards}
        is_sure = existing.holders == held and not existing.is_unsettled
        return DropTable(table=existing.spec.name, incarnation=existing.spec.incarnation if is_sure else 0)

    @contextmanager
    def _change_of(self, *tables: str) -> Iterator[None]:
        with self._schema_change:
            self._changing = tables
            try:
                yield
            finally:
                self._changing = ()

    def _store_schema(self, name: str, schema: Schema | None) -> None:
        with self._lock:
            self._state.commit(schemas={name: schema})

    def _record_tables(self, what: str, *specs: TableSpec) -> None:
        names = tuple(spec.name for spec in specs)
        number = specs[0].incarnation if len(specs) == 1 else 0
        said = f"{'table' if len(names) == 1 else 'tables'} {', '.join(names[:_NAMED])} {what}"
        said += f" (and {len(names) - _NAMED} more)" if len(names) > _NAMED else ""
        self.events.append(ClusterEvent(kind="schema", text=said, tables=names, incarnation=number))

    def _view(self) -> ClusterView:
        entries = self._membership.entries()
        incarnations = {entry.shard: entry.incarnation for entry in entries}
        schemas = self._state.schemas
        whole = [name for name, schema in schemas.items() if schema.holders == incarnations and not schema.is_unsettled]
        return ClusterView(
            cluster_version=self._state.cluster_version,
            num_shards=self._num_shards,
            ready=all(entry.state == "up" for entry in entries),
            shards=tuple(entries),
            tables=tuple(schemas[name].spec for name in whole),
            bucket_shards=self._state.bucket_map.bucket_shards,
            map_version=self._state.bucket_map.version,
            incomplete_tables=tuple(
                name for name in schemas if name not in whole and self._is_incomplete(name, entries)
            ),
            restoring_tables=tuple(name for name, schema in schemas.items() if schema.for_restore),
        )

    def _is_incomplete(self, name: str, entries: Sequence[ShardEntry]) -> bool:
        """Return whether a table is incomplete for good: neither in progress, nor on shards yet to report it."""
        schema = self._state.schemas[name]
        if schema.for_restore:
            return True  # for good, if the process that restores it is gone
        if schema.is_unsettled:
            return name not in self._changing
        return any(
            schema.holders.get(entry.shard) != entry.incarnation for entry in entries if entry.state != "missing"
        )

    def _ready_view(self) -> ClusterView:
        view = self.describe()
        absent = [f"{entry.shard} ({entry.state})" for entry in view.shards if entry.state in ("lost", "missing")]
        if absent:
            raise ClusterNotReady(f"shards {', '.join(absent)} of {view.num_shards} are not up; start their servers")
        return view

    @staticmethod
    def _check_reuse(existing: Schema, spec: TableSpec, reuse: bool, view: ClusterView) -> None:
        if not reuse:
            raise TableExists(
                f"table {spec.name!r} exists; pass reuse=True to go on with its rows, drop it (cluster.drop_table, or "
                f"geartrain table drop {shlex.quote(spec.name)}), or choose another name"
            )
        if other := existing.spec.fixed_unlike(spec):
            raise SpecMismatch(
                f"table {spec.name!r} is another: its {other}; no table can be altered in that. Ask for it as it is, "
                "or choose another name"
            )
        lost = [entry.shard for entry in view.shards if existing.holders.get(entry.shard) != entry.incarnation]
        if lost:
            raise ShardRestarted(
                f"table {spec.name!r} lost its rows on shards {lost}, which were restarted; drop it and create it anew"
            )
