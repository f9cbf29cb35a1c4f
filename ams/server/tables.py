"""Tables of one shard by name: created, found for a call, published after a restore, dropped."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from geartrain.ams.kernels._core import Engine
from geartrain.ams.tables.expiry import NEVER, ExpiryState, farthest, next_scan
from geartrain.ams.tables.row_table import RowTable, TableClock
from geartrain.ams.values.errors import GeartrainError, SpecMismatch, TableExists, being_restored
from geartrain.ams.values.shard_messages import CallContext, Done, Reply, TableState
from geartrain.ams.values.specs import Ids, TableSpec

_LATEST_START = 2**61
"""Largest first step of a job, so that one that starts there, after a wrong step, has as many steps left below the
largest that a push may have."""


@dataclass(frozen=True)
class RestoreWork:
    """Restore of tables with its reply: a repeated request joins it."""

    folder: str
    tables: frozenset[str]
    reply: Future[Reply]

    @property
    def has_failed(self) -> bool:
        """Whether the restore has ended without the rows."""
        return self.reply.done() and (self.reply.cancelled() or self.reply.exception() is not None)


class ShardTable:
    """Table of a shard: its rows, and their state of restore and expiry."""

    def __init__(self, rows: RowTable, *, for_restore: bool) -> None:
        """``for_restore``: reads and writes are refused until it has the rows of a snapshot and is published."""
        self.rows = rows
        self.restored_from = ""
        """Folder of the snapshot that its rows were first restored from; empty: none."""
        self.restore: RestoreWork | None = None
        """Restore of its rows, under way or done."""
        self.expiry_pass: Any = None
        """Expiry scan under way: an :class:`~geartrain.ams.server.expiry_schedule.ExpiryPass`."""
        self.expiry_doubtful = False
        """Value of :attr:`ExpiryState.is_doubtful`."""
        self.expiry_leap = TableClock(0, 0)
        """Value of :attr:`ExpiryState.leap`, up to the last read from the rows."""
        self.expired = 0
        """Rows removed by expiry, since the table was made here."""
        self.plan_expiry()
        self.is_whole = self.is_public = not for_restore
        """Whether it has all rows of ``restored_from``; and whether others may see it: a table that is being restored
        is published once all shards have its rows."""
        self.update_engine()

    @property
    def spec(self) -> TableSpec:
        """Spec of the table."""
        return self.rows.spec

    @property
    def is_open(self) -> bool:
        """Whether it may be read and written."""
        return self.is_whole and self.is_public

    @property
    def expiry_state(self) -> ExpiryState:
        """Expiry state for a restore of these rows, so that they expire as here."""
        self.expiry_leap = farthest([self.expiry_leap, self.rows.pop_clock_jump()])
        served = self.rows.served
        due = TableClock(served.expiry_step, served.expiry_seconds)
        if self.expiry_pass is not None:  # after a restore the scan starts anew
            due = TableClock(0, NEVER)
        return ExpiryState(self.expiry_doubtful, self.expiry_leap, due)

    @expiry_state.setter
    def expiry_state(self, state: ExpiryState) -> None:
        self.expiry_doubtful, self.expiry_leap, due = state
        if self.spec.expiry is not None:  # of another rule, which the table had then, it may be much later
            due = TableClock(*map(min, due, next_scan(self.spec.expiry, self.rows.clock)))
        self.rows.served.expiry_step, self.rows.served.expiry_seconds = due

    def plan_expiry(self) -> None:
        """Schedule the next expiry scan by the table's clock and rule."""
        expiry, clock, served = self.spec.expiry, self.rows.clock, self.rows.served
        self.expiry_pass, served.expiry_step, served.expiry_seconds = None, NEVER, NEVER
        if expiry is not None:
            served.expiry_step, seconds = next_scan(expiry, clock)
            if seconds != NEVER:
                served.expiry_seconds = clock.seconds + 1  # first at the first push with a time

    def update_engine(self) -> None:
        """Tell the engine whether it is open."""
        self.rows.served.is_open = self.is_open


class ShardTables:
    """Tables of one shard. Used by the thread that has the shard's turn, except where noted."""

    def __init__(self, shard: int, owned_buckets: Ids, threads: int, engine: Engine) -> None:
        """``engine`` reads and writes these tables."""
        self._shard = shard
        self._engine = engine
        self._owned_buckets = owned_buckets
        self._threads = threads
        self._tables: dict[str, ShardTable] = {}
        self.specs: tuple[TableSpec, ...] = ()
        """Specs of all tables. Any thread."""
        self.expiring: tuple[ShardTable, ...] = ()
        """Tables with expiry."""
        self.highest_incarnation = 0
        """Highest incarnation of a table that was ever here. Any thread."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tables. Any thread."""
        return tuple(spec.name for spec in self.specs)

    @property
    def unpublished(self) -> tuple[str, ...]:
        """Names of tables that are being restored and not published. Any thread."""
        tables = ((name, self._tables.get(name)) for name in self.names)
        return tuple(name for name, table in tables if table is not None and not table.is_public)

    def get(self, name: str) -> ShardTable | None:
        """Return the table in any state; None: there is none."""
        return self._tables.get(name)

    def spec(self, name: str) -> TableSpec:
        """Return the spec of a table in any state. Raises TableNotFound. Any thread."""
        table = self._tables.get(name)
        if table is None:
            raise self.not_found(name)
        return table.spec

    def check_meant(self, name: str, context: CallContext) -> None:
        """Raise TableNotFound or TableBeingRestored unless a caller may read or write the table. Any thread."""
        table = self._tables.get(name)
        if table is None:
            raise self.not_found(name)
        table.rows.served.require_open(context.table_incarnation)

    def find(self, name: str) -> ShardTable:
        """Return the table. Raises TableNotFound, and InternalError if its rows are torn."""
        table = self._tables.get(name)
        if table is None:
            raise self.not_found(name)
        table.rows.served.require_whole()
        return table

    def open(self, name: str, context: CallContext) -> ShardTable:
        """Return the table of :meth:`find` if the caller may read or write it. Also raises TableBeingRestored."""
        table = self.find(name)
        table.rows.served.require_open(context.table_incarnation)
        return table

    def create(self, spec: TableSpec, *, for_restore: bool) -> Done:
        """Create a table. Raises SpecMismatch or TableExists if there is another of the name."""
        existing = self._tables.get(spec.name)
        if existing is not None:
            if not existing.spec.is_same_table(spec):
                raise SpecMismatch(f"table {spec.name!r} exists with other settings: its {existing.spec.unlike(spec)}")
            if spec.incarnation not in (0, existing.spec.incarnation):
                raise TableExists(f"shard {self._shard} has another table of the name {spec.name!r}; drop it first")
            return Done(duplicate=True)
        rows = RowTable(spec, self._owned_buckets, threads=self._threads)
        self._tables[spec.name] = ShardTable(rows, for_restore=for_restore)
        self._engine.add_table(rows.served)
        self.highest_incarnation = max(self.highest_incarnation, spec.incarnation)
        self._record_specs()
        return Done()

    def check_alter(self, spec: TableSpec) -> ShardTable:
        """Return the table to alter. Raises TableNotFound, SpecMismatch, and as :meth:`RowTable.check_alter`, unless it
        has later settings."""
        table = self.find(spec.name)
        table.rows.served.require_meant(spec.incarnation)
        if other := table.spec.fixed_unlike(spec):
            raise SpecMismatch(f"table {spec.name!r} cannot be altered to another: its {other}")
        if spec.altered > table.spec.altered:
            table.rows.check_alter(spec)
        return table

    def alter(self, spec: TableSpec) -> Done:
        """Change a table's settings, unless it has later ones. Raises MemoryError, and as :meth:`check_alter`."""
        table = self.check_alter(spec)
        if spec.altered <= table.spec.altered:
            return Done(duplicate=True)
        expiry = table.spec.expiry
        self._engine.expire(spec.name, lambda: table.rows.alter(spec))  # removed rows are a write
        if table.spec.expiry != expiry:
            table.plan_expiry()
        self._record_specs()
        return Done()

    def publish(self, name: str, incarnation: int) -> Done:
        """Publish a restored table. Raises TableNotFound and TableBeingRestored."""
        table = self.find(name)
        table.rows.served.require_meant(incarnation)
        if not table.is_whole:
            raise being_restored(name)
        was_public, table.is_public = table.is_public, True
        table.update_engine()
        return Done(duplicate=was_public)

    def remove(self, name: str) -> bool:
        """Remove a table and its rows; return whether there was one."""
        found = self._tables.pop(name, None) is not None
        self._engine.remove_table(name)
        self._record_specs()
        return found

    def states(self) -> tuple[TableState, ...]:
        """Return the state of every table."""
        return tuple(
            TableState(
                spec=table.spec,
                rows=table.rows.num_present,
                memory_bytes=table.rows.memory_bytes,
                writes=table.rows.served.all_writes,
                staleness=tuple(table.rows.served.staleness),
                expired=table.expired,
                evicted=table.rows.num_evicted,
                refused_ids=table.rows.refused.ids,
                refused_gradients=table.rows.refused.gradients,
                refused_occurrences=table.rows.refused.occurrences,
                next_step=min(table.rows.clock.step + 1, _LATEST_START) if any(table.rows.clock) else 0,
            )
            for table in self._tables.values()
        )

    def counted(self) -> list[tuple[TableState, int, dict[str, int]]]:
        """Return the state of every table, the rows created here by pushes and assigns, and its bytes by part."""
        tables = self._tables.values()
        return [
            (state, table.rows.served.created, table.rows.memory_parts)
            for state, table in zip(self.states(), tables, strict=True)
        ]

    def not_found(self, name: str) -> GeartrainError:
        """Return the error for a name that has no table."""
        error: GeartrainError = self._engine.not_found(name)
        return error

    def _record_specs(self) -> None:
        self.specs = tuple(table.spec for table in self._tables.values())
        self.expiring = tuple(table for table in self._tables.values() if table.spec.expiry is not None)
