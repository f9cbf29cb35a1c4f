"""A shard: one request at a time, each run to completion.

So no row is ever torn, no row is locked, and writes are applied in one order. Requests wait in a queue for the shard's
own thread; one that finds the shard idle may run on the thread that brought it (:meth:`Shard.run`), which saves two
changes of thread.
"""

from __future__ import annotations

import contextlib
import math
import queue
import secrets
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType

from geartrain.ams.observe import failpoints
from geartrain.ams.programs.hosted import HostedModels
from geartrain.ams.server.completed_writes import WriteMarks
from geartrain.ams.server.freeze_leases import FreezeLeases
from geartrain.ams.server.frozen import FrozenTables, marks_for, restore_tables
from geartrain.ams.server.frozen_marks import held_marks, restore_marks, writes_before
from geartrain.ams.server.frozen_steps import restore_steps, steps_of
from geartrain.ams.server.hosting import Hosting, joint_update
from geartrain.ams.server.lease import Lease
from geartrain.ams.server.sync_groups import SyncGroups, joint_push
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.errors import (
    GeartrainError,
    InternalError,
    InvalidArgument,
    OutOfMemory,
    ShardRestarted,
    ShardUnavailable,
    SnapshotFailed,
    SpecMismatch,
    StaleClient,
    StaleCluster,
    StepMismatch,
    TableExists,
    TableNotFound,
    being_restored,
)
from geartrain.ams.values.interrupts import held
from geartrain.ams.values.messages import (
    FREEZE_LEASE_SECONDS,
    Assign,
    CallContext,
    ComputeHosted,
    CreateTable,
    Describe,
    Done,
    DropTable,
    Fence,
    Freeze,
    PublishTable,
    Pull,
    Push,
    Reply,
    Request,
    Restore,
    ShardState,
    TableState,
    Thaw,
    UpdateHosted,
    WriteFrozen,
    Written,
)
from geartrain.ams.values.specs import Ids, TableSpec

Clock = Callable[[], float]
_REMEMBERED_FREEZES = 256


@dataclass(frozen=True)
class _Restoring:
    """A request to restore tables, and the work that answers it: a repeated one joins it."""

    folder: str
    tables: frozenset[str]
    work: Future[Reply]

    @property
    def has_failed(self) -> bool:
        return self.work.done() and (self.work.cancelled() or self.work.exception() is not None)


@dataclass
class _Table:
    rows: RowTable
    spec: TableSpec
    writes: int = 0
    """Since it was made here."""
    writes_before: int = 0
    """Those that the snapshot holds which it was restored from."""
    restored_from: str = ""
    """Folder of the snapshot whose rows it was given first; empty: none."""
    is_whole: bool = True
    """Whether it has all rows of ``restored_from``."""
    is_public: bool = True
    """False: made to be restored, and not published, since other shards may not have its rows yet."""
    restore: _Restoring | None = None
    """What gives, or gave, it the rows of a snapshot."""

    @property
    def is_open(self) -> bool:
        """Whether it may be read and written."""
        return self.is_whole and self.is_public

    @property
    def all_writes(self) -> int:
        return self.writes_before + self.writes


@dataclass(frozen=True)
class _Call:
    context: CallContext
    request: Request
    future: Future[Reply]


def new_incarnation() -> int:
    """Return the incarnation of a shard that begins. Nobody orders those of shards, so that no clock need be right."""
    return 1 + secrets.randbelow(2**63 - 1)


class Shard:
    """The rows of some buckets of every table.

    A very large request may use ``threads`` threads on disjoint rows; requests still run one after the other.
    Thread-safe: any thread may :meth:`submit`; the shard's own thread does the work.
    """

    def __init__(
        self,
        shard: int,
        owned_buckets: Ids,
        *,
        incarnation: int,
        cluster_version: int = 1,
        sync_timeout_seconds: float = 60.0,
        threads: int = 1,
        lease: Lease | None = None,
        clock: Clock = time.monotonic,
        models: HostedModels = MappingProxyType({}),
        freeze_lease_seconds: float = FREEZE_LEASE_SECONDS,
    ) -> None:
        self.shard = shard
        self.lease = lease
        """None: nobody else can hold the shard (it is embedded)."""
        self.incarnation = incarnation
        self.cluster_version = cluster_version
        self._owned_buckets = owned_buckets
        self._threads = threads
        self._clock = clock
        self._started = clock()
        self._tables: dict[str, _Table] = {}
        self._specs: dict[str, TableSpec] = {}
        self._highest_table = 0
        """The highest incarnation of a table that was ever here."""
        self._marks = WriteMarks()
        self._groups = SyncGroups(sync_timeout_seconds, clock)
        self._frozen: dict[str, FrozenTables] = {}
        """By snapshot; no table is in two."""
        self._freeze_leases = FreezeLeases(freeze_lease_seconds, clock)
        self._ended_freezes: deque[str] = deque(maxlen=_REMEMBERED_FREEZES)
        """Snapshots that hold nothing here any more: a late request must not make them hold another moment."""
        self._writing: dict[str, Future[Reply]] = {}
        """The writing of each freeze: a repeated request joins it."""
        self._hosting = Hosting(models, owned_buckets, threads)
        self._files = ThreadPoolExecutor(1, thread_name_prefix=f"shard-{shard}-files")
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._closed = False
        self._gate = threading.Lock()
        """Guards ``_closed`` and ``_num_queued``."""
        self._num_queued = 0
        """Calls that are in the queue, or taken from it and not yet done."""
        self._turn = threading.Lock()
        """Held by the thread at work: whoever holds it owns tables, marks and groups."""
        self._thread = threading.Thread(target=self._serve, name=f"shard-{shard}", daemon=True)
        self._thread.start()

    def submit(self, context: CallContext, request: Request) -> Future[Reply]:
        """Queue a request; the future holds its reply or a GeartrainError. Never blocks."""
        call = _Call(context, request, Future())
        with self._gate:
            if self._closed:
                call.future.set_exception(self._shut_down())
            else:
                self._num_queued += 1
                self._calls.put(call)
        return call.future

    def run(self, context: CallContext, request: Request) -> Future[Reply]:
        """:meth:`submit`, but done on this thread, before it returns, if nothing else is waiting or at work.

        On the main thread it is :meth:`submit`.
        """
        # Python interrupts its main thread anywhere, also between the update of the rows and its mark. And only the
        # shard's own thread watches how long a part of a synchronous push waits for the others, or a freeze is kept.
        is_interruptible = threading.current_thread() is threading.main_thread()
        is_watched = isinstance(request, Freeze) or (
            isinstance(request, Push | UpdateHosted) and request.group is not None
        )
        if is_interruptible or is_watched:
            return self.submit(context, request)
        with self._gate:
            alone = not self._closed and self._num_queued == 0 and self._turn.acquire(blocking=False)
        if not alone:
            return self.submit(context, request)
        call = _Call(context, request, Future())
        try:
            self._run(call)
        finally:
            self._turn.release()
        return call.future

    def spec(self, table: str, context: CallContext) -> TableSpec:
        """Return the spec of the table that a caller means, to read or write it. Raises TableNotFound and
        TableBeingRestored. Any thread."""
        try:
            found = self._tables[table]
        except KeyError:
            raise self._no_table(table) from None
        _require_open(found, context)
        return found.spec

    def check_fence(self, context: CallContext) -> None:
        """Raise unless the caller may be answered. Any thread.

        ShardUnavailable: the shard may belong to another process. ShardRestarted, StaleCluster: the caller means
        another past than this shard's.
        """
        self.check_lease()
        if context.shard_incarnation not in (0, self.incarnation):
            raise ShardRestarted(
                f"shard {self.shard} was restarted (incarnation {self.incarnation}, the call means "
                f"{context.shard_incarnation}): rows in its memory are gone; connect again and restore "
                "a snapshot, or start the job again"
            )
        if context.cluster_version not in (0, self.cluster_version):
            raise StaleCluster(
                f"the call means cluster version {context.cluster_version}, shard {self.shard} is at "
                f"{self.cluster_version}; ask the scheduler again"
            )

    def check_lease(self) -> None:
        """Raise ShardUnavailable if the shard may belong to another process by now. Any thread."""
        if self.lease is not None:
            self.lease.check()

    @property
    def highest_incarnation(self) -> int:
        """The highest of a job, stream or table that it has seen. Any thread."""
        return max(self._marks.highest_incarnation, self._highest_table)

    @property
    def specs(self) -> tuple[TableSpec, ...]:
        """The specs of all tables."""
        return tuple(self._specs.values())

    @property
    def restoring_tables(self) -> tuple[str, ...]:
        """The names of those that are being restored and not published. Any thread."""
        tables = ((name, self._tables.get(name)) for name in self._specs)
        return tuple(name for name, table in tables if table is not None and not table.is_public)

    def close(self) -> None:
        """Finish the requests that are queued, refuse those that come later, end the thread. Idempotent."""
        with self._gate:
            if not self._closed:
                self._closed = True
                self._calls.put(None)
        self._thread.join()
        with self._turn:
            for snapshot_id in list(self._frozen):
                self._thaw(snapshot_id, kept=False)
        self._files.shutdown(wait=True, cancel_futures=True)
        self._hosting.close()

    def _shut_down(self) -> ShardUnavailable:
        return ShardUnavailable(f"shard {self.shard} is shut down")

    def _serve(self) -> None:
        while True:
            call = self._next_call()
            if call is None:
                break
            with self._turn:
                self._run(call)
            with self._gate:
                self._num_queued -= 1
            del call  # the rows of a request are not kept until the next one arrives
        with self._turn:
            for context, _ in [entry for table in list(self._tables) for entry in self._groups.drop_table(table)]:
                error = ShardUnavailable(f"shard {self.shard} was shut down before its sync group met")
                self._marks.failed(context, error)

    def _next_call(self) -> _Call | None:
        while True:
            with self._turn:
                deadlines = [self._groups.next_deadline(), self._freeze_leases.next_deadline()]
            deadline = min((one for one in deadlines if one is not None), default=None)
            if deadline is None:
                return self._calls.get()
            left = deadline - self._clock()
            if left > 0:
                with contextlib.suppress(queue.Empty):
                    return self._calls.get(timeout=left)
            # Before the next call, or a busy shard would never tell the ranks that wait.
            with self._turn:
                for pushes, error in self._groups.expire():
                    for context, _ in pushes:
                        self._marks.failed(context, error)
                self._end_silent_freezes()

    # Everything below runs on the thread that holds the turn.

    def _run(self, call: _Call) -> None:
        # As if it had never come: no mark knows of it yet. A write that has begun goes on without its caller.
        if not call.future.set_running_or_notify_cancel():
            return
        try:
            self.check_fence(call.context)
            if isinstance(call.request, Push | Assign | UpdateHosted):
                self._write(call, call.request)
            elif isinstance(call.request, WriteFrozen | Restore):
                self._marks.require_current(call.context)
                _pass_on(self._in_background(call.request), call.future)
            else:
                call.future.set_result(self._answer(call.context, call.request))
        except GeartrainError as error:
            _fail(call.future, error)
        except MemoryError as error:
            _fail(call.future, _as_ours(error, self.shard))
        except Exception as error:
            # A defect must reach the caller and must not end the shard that others rely on.
            _fail(call.future, InternalError(f"shard {self.shard}: {error!r}\n{traceback.format_exc()}"))

    def _answer(self, context: CallContext, request: Request) -> Reply:
        match request:
            case Pull():
                table = self._table_meant(request.table, context)
                if request.required_sync is not None:
                    self._groups.require_step(request.table, request.required_sync)
                with held(request.leave):
                    table.rows.pull(request.ids, request.out, request.positions, request.present)
                return Done()
            case ComputeHosted():
                table = self._table_meant(request.table, context)
                if request.required_sync is not None:
                    self._groups.require_step(request.table, request.required_sync)
                return self._hosting.compute(table.rows, request)
            case CreateTable():
                return self._create(request.spec, for_restore=request.for_restore)
            case PublishTable():
                return self._publish(request.table, request.incarnation)
            case DropTable():
                return self._drop(request.table, request.incarnation)
            case Describe():
                return self._describe()
            case Freeze():
                self._marks.require_current(context)  # or a stopped process would mix two pasts of its job
                return self._freeze(request)
            case Thaw():
                failpoints.reach("thaw.before")
                self._thaw(request.snapshot_id, kept=request.kept)
                return Done()
            case Fence():
                return self._fence(request)
            case _:
                raise InternalError(f"shard {self.shard} has no answer to {type(request).__name__}")

    def _write(self, call: _Call, request: Push | Assign | UpdateHosted) -> None:
        if request.table in self._tables:  # not even as a repetition: the rows of the write it repeats are gone
            _require_open(self._tables[request.table], call.context)
        if not self._marks.admit(call.context, call.future):
            return
        try:
            if not isinstance(request, Assign):
                _check_settings(request)
            table = self._table(request.table)
            failpoints.reach("shard.apply.before")
            if not isinstance(request, Assign) and request.group is not None:
                self._write_jointly(call.context, request, table)
                return
            created = self._apply(table, request)
            failpoints.reach("shard.apply.after")
            table.writes += 1
        except BaseException as error:
            self._marks.failed(call.context, _as_ours(error, self.shard))
            return
        self._marks.applied(call.context, Done(created=created), request.table)

    def _apply(self, table: _Table, request: Push | Assign | UpdateHosted) -> int:
        if isinstance(request, UpdateHosted):
            return self._hosting.update(table.rows, request, self.check_lease)
        self.check_lease()
        with held(request.leave):
            if isinstance(request, Push):
                return table.rows.push(
                    request.ids,
                    request.gradients,
                    lr=request.lr,
                    scale=request.scale,
                    ends_step=not request.step_goes_on,
                )
            return table.rows.assign(request.ids, request.rows)

    def _write_jointly(self, context: CallContext, write: Push | UpdateHosted, table: _Table) -> None:
        if self._groups.is_applied(write):
            self._marks.applied(context, Done(duplicate=True), write.table)
            return
        replaced = self._groups.waiting_of_rank(write)
        parts = self._groups.join(context, write)
        if replaced is not None:  # or its caller, if it still lives, would ask for its reply for ever
            self._marks.failed(replaced, _replaced(write))
        if parts is None:
            return
        try:
            with contextlib.ExitStack() as leaves:
                for _, part in parts:
                    if isinstance(part, Push):
                        leaves.enter_context(held(part.leave))
                created = self._apply(table, _joint([part for _, part in parts]))
            failpoints.reach("shard.apply.after")
        except BaseException as error:
            self._groups.abandon(write)
            for part_context, _ in parts:
                self._marks.failed(part_context, _as_ours(error, self.shard))
            return
        table.writes += 1
        self._groups.complete(write)
        for part_context, _ in parts:
            self._marks.applied(part_context, Done(created=created), write.table)

    def _create(self, spec: TableSpec, *, for_restore: bool) -> Done:
        existing = self._tables.get(spec.name)
        if existing is not None:
            if existing.spec != spec:
                raise SpecMismatch(f"table {spec.name!r} exists with other settings: its {existing.spec.unlike(spec)}")
            if spec.incarnation not in (0, existing.spec.incarnation):
                raise TableExists(f"shard {self.shard} has another table of the name {spec.name!r}; drop it first")
            return Done(duplicate=True)
        rows = RowTable(spec, self._owned_buckets, threads=self._threads)
        self._tables[spec.name] = _Table(rows, spec, is_whole=not for_restore, is_public=not for_restore)
        self._highest_table = max(self._highest_table, spec.incarnation)
        self._specs = {name: table.spec for name, table in self._tables.items()}
        return Done()

    def _publish(self, name: str, incarnation: int) -> Done:
        table = self._table(name)
        _require_meant(table.spec, incarnation)
        if not table.is_whole:
            raise being_restored(name)
        was_public, table.is_public = table.is_public, True
        return Done(duplicate=was_public)

    def _drop(self, name: str, incarnation: int) -> Done:
        table = self._tables.get(name)
        if table is not None and incarnation not in (0, table.spec.incarnation):
            return Done(duplicate=True)
        for context, _ in self._groups.drop_table(name):
            self._marks.failed(context, self._no_table(name))
        table = self._tables.pop(name, None)
        if table is not None:
            self._marks.dropped(name)
            for frozen in list(self._frozen.values()):
                if name in frozen.tables:  # whoever took it may be gone, and its rows would be held for good
                    self._thaw(frozen.snapshot_id, kept=False)
        self._specs = {name: table.spec for name, table in self._tables.items()}
        return Done(duplicate=table is None)

    def _freeze(self, request: Freeze) -> Done:
        if request.snapshot_id in self._ended_freezes:
            raise SnapshotFailed(
                f"snapshot {request.snapshot_id} was given up, completed or superseded on shard {self.shard}; take a "
                "new one"
            )
        if request.snapshot_id in self._frozen:
            self._freeze_leases.renew(request.snapshot_id)
            return Done(duplicate=True)
        tables = {name: self._table(name).rows for name in request.tables or self._tables}
        for name in tables:
            if not self._tables[name].is_open:
                raise SnapshotFailed(
                    f"table {name!r} is being restored; take the snapshot when all of it is there, or of other tables"
                )
        for other in list(self._frozen.values()):
            if not request.tables or not other.tables.isdisjoint(tables):
                self._thaw(other.snapshot_id, kept=False)  # whoever asked for that one is gone, or has given it up
        writes = {name: self._tables[name].all_writes for name in tables}
        marks = held_marks(self._marks, self._groups, tables, steps_of(tables), writes)
        failpoints.reach("freeze.before")
        self._frozen[request.snapshot_id] = FrozenTables(
            request.snapshot_id, tables, marks=marks, parent_id=request.parent_id
        )
        self._freeze_leases.renew(request.snapshot_id)
        failpoints.reach("freeze.after")
        return Done()

    def _fence(self, fence: Fence) -> Done:
        self._marks.fence(fence.job, fence.incarnation, forget=False)
        error = StaleClient(
            f"incarnation {fence.incarnation} of {fence.job!r} took over while this push waited for its sync group; "
            "nothing of it was applied here; stop this process"
        )
        for context in self._groups.fence(fence.job, fence.incarnation, forget=fence.forget):
            self._marks.failed(context, error)
        if fence.forget:
            self._marks.fence(fence.job, fence.incarnation, forget=True)
        return Done()

    def _thaw(self, snapshot_id: str, *, kept: bool) -> None:
        """End a freeze, or, if it is not here, one that is still on the way."""
        frozen = self._frozen.pop(snapshot_id, None)
        self._freeze_leases.end(snapshot_id)
        self._writing.pop(snapshot_id, None)
        if frozen is not None:
            frozen.thaw(kept=kept)
        if snapshot_id not in self._ended_freezes:
            self._ended_freezes.append(snapshot_id)

    def _end_silent_freezes(self) -> None:
        """Thaw what nobody has renewed and nobody is writing."""
        for snapshot_id in self._freeze_leases.expired():
            writing = self._writing.get(snapshot_id)
            if writing is not None and not writing.done():
                self._freeze_leases.renew(snapshot_id)
            else:
                self._thaw(snapshot_id, kept=False)

    def _in_background(self, request: WriteFrozen | Restore) -> Future[Reply]:
        """Begin work on files on a thread of its own: the shard goes on."""
        if isinstance(request, Restore):
            tables = {name: self._table(name) for name in request.tables}
            for table, incarnation in zip(tables.values(), request.incarnations, strict=bool(request.incarnations)):
                _require_meant(table.spec, incarnation)
            return self._restoring(request.folder, tables)
        frozen = self._frozen.get(request.snapshot_id)
        if frozen is None:
            raise SnapshotFailed(
                f"shard {self.shard} holds no freeze of snapshot {request.snapshot_id}: it was given up or superseded; "
                "take the snapshot again"
            )
        self._freeze_leases.renew(request.snapshot_id)
        if request.snapshot_id not in self._writing:
            self._writing[request.snapshot_id] = self._files.submit(self._write_frozen, frozen, request.folder)
        return self._writing[request.snapshot_id]

    def _restoring(self, folder: str, tables: dict[str, _Table]) -> Future[Reply]:
        """Begin to restore tables, or join who does it or did it already, unless they were written to since."""
        names = frozenset(tables)
        for known in [table.restore for table in tables.values()][:1]:
            is_same = known is not None and (known.folder, known.tables) == (folder, names)
            if is_same and all(table.restore is known and not table.writes for table in tables.values()):
                assert known is not None
                if not known.has_failed:
                    return known.work
        work: Future[Reply] = self._files.submit(self._restore, folder, tables)
        for table in tables.values():
            table.restore = _Restoring(folder, names, work)
        return work

    def _write_frozen(self, frozen: FrozenTables, folder: str) -> Reply:
        entries = frozen.write(folder, self.shard)
        return Written(files=tuple(entry.model_dump_json() for entry in entries), deltas=frozen.deltas)

    def _begin_restore(self, folder: str, tables: dict[str, _Table]) -> None:
        """Mark the tables as being restored, all of them or, if one cannot be, none."""
        for name, table in tables.items():
            if table.restored_from not in ("", folder):
                raise TableExists(
                    f"table {name!r} was restored from {table.restored_from}; drop it and restore it anew, or two "
                    "moments would be mixed"
                )
        for name, table in tables.items():
            if table.restored_from:
                continue
            # Whoever holds or has kept it from before means a table without these rows.
            for frozen in [frozen for frozen in self._frozen.values() if name in frozen.tables]:
                self._thaw(frozen.snapshot_id, kept=False)
            table.rows.kept_as = ""
            table.restored_from, table.is_whole = folder, False

    def _restore(self, folder: str, tables: dict[str, _Table]) -> Reply:
        rows = {name: table.rows for name, table in tables.items()}
        turn = _TurnUnlessWritten(self._turn, tables, self._tables)

        def begin() -> None:
            with turn:
                self._begin_restore(folder, tables)

        num_read = restore_tables(folder, rows, self._owned_buckets, turn, begin)
        sources = marks_for(folder, self._owned_buckets)
        if not tables:  # asked whether it can be read here
            return Done()
        with turn:
            restore_marks(sources, rows, self._marks, self._groups)
            restore_steps(sources, rows)
            for name, table in tables.items():
                table.writes_before = writes_before(sources, name)
                table.is_whole = True
        return Done(created=num_read)

    def _describe(self) -> ShardState:
        tables = tuple(
            TableState(
                spec=table.spec,
                rows=table.rows.num_present,
                memory_bytes=table.rows.memory_bytes,
                pushes=table.all_writes,
            )
            for table in self._tables.values()
        )
        return ShardState(
            shard=self.shard,
            incarnation=self.incarnation,
            cluster_version=self.cluster_version,
            uptime_seconds=self._clock() - self._started,
            unix_seconds=time.time(),
            tables=tables,
        )

    def _table(self, name: str) -> _Table:
        try:
            table = self._tables[name]
        except KeyError:
            raise self._no_table(name) from None
        if table.rows.torn:
            raise InternalError(table.rows.torn)
        return table

    def _table_meant(self, name: str, context: CallContext) -> _Table:
        table = self._table(name)
        _require_open(table, context)
        return table

    def _no_table(self, name: str) -> TableNotFound:
        known = ", ".join(map(repr, self._specs)) or "none"
        return TableNotFound(f"there is no table {name!r}; tables of this cluster: {known}")


class _TurnUnlessWritten:
    """A shard's turn, for rows read back. Raises TableExists once a table has been written to, TableNotFound once it
    was dropped.

    A repeated request to restore may arrive when training has long gone on; it must not undo that.
    """

    def __init__(self, turn: threading.Lock, tables: dict[str, _Table], held: Mapping[str, _Table]) -> None:
        self._turn = turn
        self._tables = tables
        self._held = held
        """All tables that the shard holds now."""

    def __enter__(self) -> None:
        self._turn.acquire()
        dropped = [name for name, table in self._tables.items() if self._held.get(name) is not table]
        if dropped:
            self._turn.release()
            raise TableNotFound(f"table {dropped[0]!r} was dropped while it was restored; restore it again")
        written = [name for name, table in self._tables.items() if table.writes]
        if written:
            self._turn.release()
            raise TableExists(
                f"table {written[0]!r} has been written to since it was made; drop it and restore it anew, or its "
                "writes would be lost"
            )

    def __exit__(self, *_: object) -> None:
        self._turn.release()


def _joint(parts: list[Push | UpdateHosted]) -> Push | UpdateHosted:
    """One write that equals those of all ranks."""
    pushes = [part for part in parts if isinstance(part, Push)]
    updates = [part for part in parts if isinstance(part, UpdateHosted)]
    if pushes and updates:
        raise StepMismatch(
            f"some ranks push gradients to table {parts[0].table!r}, others update it by a hosted model; give all "
            "ranks of a head the same rows="
        )
    return joint_push(pushes) if pushes else joint_update(updates)


def _replaced(write: Push | UpdateHosted) -> StepMismatch:
    """The error of a push that waits for its group when its rank pushes the step once more."""
    assert write.group is not None
    return StepMismatch(
        f"rank {write.group.rank} of job {write.group.job!r} pushed step {write.group.sequence} of table "
        f"{write.table!r} once more while this push of it waited, and that one counts; if this one was not given up, "
        "another process runs as the same rank: stop one of them"
    )


def _require_meant(spec: TableSpec, incarnation: int) -> None:
    """Raise TableNotFound if another table of the name is meant; 0 means any."""
    if incarnation not in (0, spec.incarnation):
        raise TableNotFound(
            f"the table {spec.name!r} that is meant was dropped, and another was made or restored under its name; "
            f"open that one: cluster.table({spec.name!r}), or make its head, dense module or slow gear anew"
        )


def _require_open(table: _Table, context: CallContext) -> None:
    """Raise TableBeingRestored, or TableNotFound if another table of the name is meant."""
    if not table.is_open:
        raise being_restored(table.spec.name)
    _require_meant(table.spec, context.table_incarnation)


def _check_settings(push: Push | UpdateHosted) -> None:
    if push.lr is not None and not (math.isfinite(push.lr) and push.lr >= 0):
        raise InvalidArgument(f"lr is {push.lr!r}; it must be finite and >= 0")
    if not math.isfinite(push.scale):
        raise InvalidArgument(f"scale is {push.scale!r}; it must be finite (a skipped step pushes nothing)")


def _as_ours(error: BaseException, shard: int) -> GeartrainError:
    if isinstance(error, GeartrainError):
        return _without_frames(error)
    if isinstance(error, MemoryError):
        return OutOfMemory(f"shard {shard} is out of memory: the system gives it no more; the call changed nothing")
    return InternalError(f"shard {shard}: {error!r}\n{''.join(traceback.format_exception(error))}")


def _pass_on(work: Future[Reply], future: Future[Reply]) -> None:
    """Answer ``future`` as ``work`` ends."""

    def ended(work: Future[Reply]) -> None:
        with contextlib.suppress(InvalidStateError):  # the caller gave up waiting
            error = None if work.cancelled() else work.exception()
            if work.cancelled():
                future.set_exception(ShardUnavailable("the shard was shut down meanwhile"))
            elif error is None:
                future.set_result(work.result())
            else:
                future.set_exception(error if isinstance(error, GeartrainError) else InternalError(repr(error)))

    work.add_done_callback(ended)


def _fail(future: Future[Reply], error: GeartrainError) -> None:
    if not future.done():
        future.set_exception(_without_frames(error))


def _without_frames(error: GeartrainError) -> GeartrainError:
    """The error without the calls it came through: they hold the request and its table, which would outlive a drop
    until the garbage collector finds the circle of error, call and future.
    """
    one: BaseException | None = error
    while one is not None:
        one.__traceback__ = None
        one = one.__cause__ or one.__context__
    return error
