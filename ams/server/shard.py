"""Shard: the rows of some buckets, and the handling of all its requests.

Requests run one at a time, each to completion (:mod:`single_writer`): so no row is ever torn, no row is locked, and
writes are applied in one order.
"""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels import ops
from geartrain.ams.kernels._core import CompletedWrites, Engine, Kind, Lease, SyncGroups, Waiter
from geartrain.ams.kernels.memory import UNLIMITED, memory_limit
from geartrain.ams.observe import failpoints
from geartrain.ams.programs.hosted import HostedModels
from geartrain.ams.server.expiry_schedule import ExpirySchedule
from geartrain.ams.server.freeze.dedup import held_dedup
from geartrain.ams.server.freeze.freezes import Freezes
from geartrain.ams.server.freeze.restore import Restores
from geartrain.ams.server.hosting import Hosting, joint_update
from geartrain.ams.server.single_writer import QueuedRequest, SingleWriter, pass_on, to_geartrain_error
from geartrain.ams.server.tables import ShardTables
from geartrain.ams.values.errors import (
    Busy,
    GeartrainError,
    InternalError,
    InvalidArgument,
    InvalidRows,
    ShardUnavailable,
    SnapshotFailed,
)
from geartrain.ams.values.shard_messages import (
    FREEZE_LEASE_SECONDS,
    AlterTable,
    Assign,
    CallContext,
    ComputeHosted,
    CreateTable,
    Describe,
    Done,
    DropTable,
    Expire,
    Fence,
    Freeze,
    PublishTable,
    Pull,
    Pulled,
    Push,
    Remove,
    Reply,
    Request,
    Restore,
    ShardState,
    TableState,
    Thaw,
    UpdateHosted,
    WriteFrozen,
)
from geartrain.ams.values.specs import Ids, TableSpec

Clock = Callable[[], float]


def new_incarnation() -> int:
    """Return a random incarnation for a new shard. They need no order, and so no correct clock."""
    return 1 + secrets.randbelow(2**63 - 1)


class Shard:
    """Rows of some buckets of every table. Thread-safe: any thread may :meth:`submit` or :meth:`run`."""

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
        shards_of_process: int = 1,
    ) -> None:
        """Start without tables.

        Args:
            shard: number in the cluster.
            owned_buckets: buckets whose rows it holds.
            incarnation: identity among all processes that ever held the shard; see :func:`new_incarnation`.
            cluster_version: version of its cluster.
            sync_timeout_seconds: longest wait of a synchronous write for the other ranks.
            threads: number for a very large request on disjoint rows; requests still run one after the other.
            lease: time until which this process holds the shard; None: no other can hold it (it is embedded).
            clock: seconds, monotonic, for time-outs and leases of freezes.
            models: hosted models by name.
            freeze_lease_seconds: lease of a freeze whose owner does not renew it.
            shards_of_process: number of shards that share its memory and CPU.
        """
        self.shard = shard
        self._shards_of_process = shards_of_process
        self._name = f"shard {shard}"
        self.lease = lease
        self.incarnation = incarnation
        self._completed_writes = CompletedWrites()
        self._groups = SyncGroups(sync_timeout_seconds, clock)
        self.engine = Engine(
            shard=shard,
            incarnation=incarnation,
            cluster_version=cluster_version,
            lease=lease,
            completed_writes=self._completed_writes,
            groups=self._groups,
        )
        """Engine of row requests, on any thread."""
        self._clock = clock
        self._started = clock()
        self._tables = ShardTables(shard, owned_buckets, threads, self.engine)
        self._expiry = ExpirySchedule(self._tables, self.engine)
        self._hosting = Hosting(models, owned_buckets, threads)
        self._files = ThreadPoolExecutor(1, thread_name_prefix=f"shard-{shard}-files")
        self._freezes = Freezes(shard, freeze_lease_seconds, clock, self._files)
        self._writer = SingleWriter(
            self._name,
            self._perform,
            turn=self.engine.turn,
            alarm=self.engine.alarm,
            next_deadline=self._next_deadline,
            expire=self._expire,
            refusal=lambda: ShardUnavailable(f"shard {shard} is shut down"),
            clock=clock,
            on_end=self._refuse_all,
        )
        self.stop_reason: str | None = None
        """Reason why it refuses all calls without having been closed; None: it does not."""
        self._restores = Restores(
            owned_buckets,
            self._tables,
            self._freezes,
            self._completed_writes,
            self._groups,
            turn=self.engine.turn,
            files=self._files,
        )

    def pull(
        self, context: CallContext, request: Pull, waiter: Waiter | None = None, *, has_turn: bool = False
    ) -> Pulled:
        """Read rows on this thread, in its turn, or in a turn that it has. Raises the error of :meth:`submit`;
        ShardUnavailable, too, if ``waiter`` leaves before the turn has come.
        """
        present = request.present
        if present is not None and (present.dtype != np.bool_ or not present.flags.carray):
            raise InvalidRows(f"present is {present.dtype} {list(present.shape)}; it must be a writable bool [M]")
        out, code = _bits(request.out, "out")
        if not request.out.flags.carray:
            raise InvalidRows("out must be writable, aligned and C-contiguous; pass a fresh array")
        writes = self.engine.pull(
            context.shard_incarnation,
            context.cluster_version,
            context.table_incarnation,
            request.table,
            ops.checked_ids(request.ids),
            out,
            code,
            None if present is None else present.view(np.uint8),
            request.required_sync,
            waiter,
            has_turn,
        )
        return Pulled(writes=writes)

    def write(
        self,
        context: CallContext,
        request: Push | Assign,
        waiter: Waiter | None = None,
        *,
        ids_are_distinct: bool = False,
        has_turn: bool = False,
    ) -> Done | Future[Done]:
        """Do :meth:`pull` for a write. A Future is returned for one that waits for other ranks: its arrays are copied.

        Unless ``ids_are_distinct``, equal ids of a push are merged, and those of an assign are refused (InvalidRows).
        """
        ids = ops.checked_ids(request.ids)
        done: Done | Future[Done]
        if isinstance(request, Assign):
            bits, code = _bits(request.rows, "rows")
            done = self.engine.assign(context, request.table, ids, bits, code, ids_are_distinct, waiter, has_turn)
        else:
            bits, code = _bits(request.gradients, "gradients")
            done = self.engine.push(
                context,
                request.table,
                ids,
                bits,
                code,
                request.lr,
                request.scale,
                request.optimizer_scalars,
                request.group,
                request.step_goes_on,
                request.batch,
                ids_are_distinct,
                waiter,
                has_turn,
            )
        return done

    def submit(self, context: CallContext, request: Request) -> Future[Reply]:
        """Queue a request; the future holds its reply or a GeartrainError. Never blocks."""
        return self._writer.submit(context, request)

    def run(self, context: CallContext, request: Request) -> Future[Reply]:
        """Do :meth:`submit` on this thread, before it returns, if nothing else is waiting or at work.

        On the main thread it is :meth:`submit`.
        """
        return self._writer.run(context, request)

    @property
    def cluster_version(self) -> int:
        """Version of its cluster."""
        return self.engine.cluster_version

    @cluster_version.setter
    def cluster_version(self, version: int) -> None:
        self.engine.cluster_version = version

    def spec(self, table: str) -> TableSpec:
        """Return the spec of a table. Raises TableNotFound. Any thread."""
        return self._tables.spec(table)

    def check_meant(self, table: str, context: CallContext) -> None:
        """Raise as :meth:`check_fence`, and TableNotFound or TableBeingRestored unless a caller may read or write its
        table; a request is checked again in its turn. Any thread."""
        self.check_fence(context)
        self._tables.check_meant(table, context)

    def check_fence(self, context: CallContext) -> None:
        """Raise unless the caller may be answered. Any thread.

        ShardUnavailable: the shard may belong to another process. ShardRestarted, StaleCluster: the caller expects
        another incarnation or cluster version.
        """
        self.engine.check_fence(context.shard_incarnation, context.cluster_version)

    def check_lease(self) -> None:
        """Raise ShardUnavailable if the shard may belong to another process by now. Any thread."""
        if self.lease is not None:
            self.lease.check()

    def record_incarnation(self, highest: int) -> None:
        """Record the highest incarnation issued by the scheduler, an approximate bound for callers. Any thread."""
        self._completed_writes.hear_given(highest)

    @property
    def highest_incarnation(self) -> int:
        """Highest incarnation of a job, stream or table that it has seen. Any thread."""
        return max(self._completed_writes.highest_incarnation, self._tables.highest_incarnation)

    @property
    def specs(self) -> tuple[TableSpec, ...]:
        """Specs of all tables. Any thread."""
        return self._tables.specs

    @property
    def restoring_tables(self) -> tuple[str, ...]:
        """Names of tables that are being restored and not published. Any thread."""
        return self._tables.unpublished

    @property
    def held_snapshots(self) -> tuple[str, ...]:
        """Ids of the snapshots with a freeze here. Any thread."""
        return self._freezes.snapshots

    def counted_tables(self, seconds: float) -> list[tuple[TableState, int, dict[str, int]]]:
        """Return :meth:`ShardTables.counted`; nothing if the turn does not come in so many seconds. Any thread."""
        turn = self.engine.turn
        if not turn.acquire_within(seconds):
            return []
        try:
            return self._tables.counted()
        finally:
            turn.release()

    def close(self) -> None:
        """Finish the queued requests, refuse later ones, stop the thread. Idempotent."""
        self.engine.close()
        self._writer.close()
        with self.engine.turn:
            error = ShardUnavailable(f"shard {self.shard} was shut down before all ranks of the sync group had pushed")
            for name in self._tables.names:
                self.engine.fail_waiting(name, error)
            for snapshot_id in self._freezes.snapshots:
                self._freezes.thaw(snapshot_id, kept=False)
            self.engine.end()
        self._files.shutdown(wait=True, cancel_futures=True)
        self._hosting.close()

    def _refuse_all(self, error: GeartrainError) -> None:
        """Fail every call from now on with ``error``, and those that wait for other ranks."""
        self.stop_reason = str(error)
        self.engine.fail(str(error))
        with self.engine.turn:
            for name in self._tables.names:
                self.engine.fail_waiting(name, error)

    # Everything below runs on the thread that has the turn.

    def _next_deadline(self) -> float | None:
        deadlines = [self._groups.next_deadline(), self._freezes.next_deadline(), self._expiry.next_deadline()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _expire(self) -> None:
        self.engine.expire_sync_groups()
        self._freezes.thaw_expired()
        self._expiry.scan()

    def _perform(self, call: QueuedRequest) -> None:
        if isinstance(call.request, Pull | Push | Assign):
            self._run_in_turn(call, call.request)
            return
        self.check_fence(call.context)
        if isinstance(request := call.request, UpdateHosted):
            self._update_hosted(call, request)
        elif isinstance(request, Remove):
            self._write(
                call, request.table, Kind.remove, lambda: self._tables.find(request.table).rows.remove(request.ids)
            )
        elif isinstance(request, WriteFrozen | Restore):
            self._completed_writes.require_current(call.context)
            files = self._restores.start(request) if isinstance(request, Restore) else self._freezes.write(request)
            pass_on(files, call.future)  # files are handled on a thread of their own: the shard goes on
        else:
            call.future.set_result(self._answer(call.context, request))

    def _run_in_turn(self, call: QueuedRequest, request: Pull | Push | Assign) -> None:
        if isinstance(request, Pull):
            call.future.set_result(self.pull(call.context, request, has_turn=True))
            return
        done = self.write(call.context, request, ids_are_distinct=True, has_turn=True)
        if isinstance(done, Future):
            pass_on(done, call.future)  # type: ignore[arg-type]
        else:
            call.future.set_result(done)

    def _answer(self, context: CallContext, request: Request) -> Reply:
        match request:
            case ComputeHosted():
                table = self._tables.open(request.table, context)
                if request.required_sync is not None:
                    self._groups.require_step(request.table, request.required_sync)
                return self._hosting.compute(table.rows, request)
            case CreateTable():
                self._completed_writes.require_possible(f"table {request.spec.name!r}", request.spec.incarnation)
                return self._tables.create(request.spec, for_restore=request.for_restore)
            case AlterTable():
                return self._alter(request)
            case PublishTable():
                return self._tables.publish(request.table, request.incarnation)
            case DropTable():
                return self._drop(request.table, request.incarnation)
            case Describe():
                return self._describe()
            case Freeze():
                self._completed_writes.require_current(context)  # or a stopped process would mix two pasts of its job
                return self._freeze(request)
            case Thaw():
                failpoints.reach("thaw.before")
                self._freezes.thaw(request.snapshot_id, kept=request.kept)
                return Done()
            case Fence():
                self.engine.fence(request.job, request.incarnation, request.forget)
                return Done()
            case Expire():
                self._completed_writes.require_current(context)
                return self._expiry.command(self._tables.open(request.table, context), request)
            case _:
                raise InternalError(f"shard {self.shard} has no answer to {type(request).__name__}")

    def _alter(self, request: AlterTable) -> Done:
        if request.dry_run:
            self._tables.check_alter(request.spec)
            return Done()
        try:
            done = self._tables.alter(request.spec)
        except Busy:
            # Frozen since it was checked. Other shards have been altered, so that its snapshot would mix settings.
            self._freezes.thaw_table(request.spec.name)
            done = self._tables.alter(request.spec)
        self.cluster_version = max(self.cluster_version, request.spec.altered)
        return done

    def _update_hosted(self, call: QueuedRequest, update: UpdateHosted) -> None:
        _check_settings(update)

        def apply(update: UpdateHosted) -> int:
            return self._hosting.update(self._tables.find(update.table).rows, update, self.check_lease)

        if update.group is None:
            self._write(call, update.table, Kind.hosted, lambda: apply(update))
        else:
            joint = self._with_caller_errors(lambda updates: apply(joint_update(updates)))
            self.engine.update_jointly(call.context, update, call.future, joint)

    def _write(self, call: QueuedRequest, table: str, kind: Kind, apply: Callable[[], int]) -> None:
        """Apply a write once, by the engine. ``apply`` returns the number of rows created or removed."""
        self.engine.write(call.context, table, kind, call.future, self._with_caller_errors(apply))

    def _with_caller_errors(self, apply: Callable[..., int]) -> Callable[..., int]:
        """Return ``apply`` with its errors as callers are to get them."""

        def translated(*arguments: Any) -> int:
            try:
                return apply(*arguments)
            except BaseException as error:
                raise to_geartrain_error(error, self._name) from None

        return translated

    def _drop(self, name: str, incarnation: int) -> Done:
        table = self._tables.get(name)
        if table is not None and incarnation not in (0, table.spec.incarnation):
            return Done(duplicate=True)
        self.engine.fail_waiting(name, self._tables.not_found(name))
        if not self._tables.remove(name):
            return Done(duplicate=True)
        self._completed_writes.dropped(name)
        self._freezes.thaw_table(name)  # its owner may be gone, and the rows would be held for ever
        return Done()

    def _freeze(self, request: Freeze) -> Done:
        if self._freezes.renewed(request):
            return Done(duplicate=True)
        # Unpublished tables belong to a restore whose process may be gone.
        all_public = set(self._tables.names).difference(self._tables.unpublished)
        tables = {name: self._tables.find(name) for name in request.tables or all_public}
        for name, table in tables.items():
            if not table.is_open:
                raise SnapshotFailed(
                    f"table {name!r} is being restored; take the snapshot when all of it is there, or of other tables"
                )
        rows = {name: table.rows for name, table in tables.items()}
        expiry = {name: table.expiry_state for name, table in tables.items() if table.spec.expiry is not None}
        dedup = held_dedup(self._completed_writes, self._groups, rows, rows, expiry)
        return self._freezes.start(request, rows, dedup)

    def _describe(self) -> ShardState:
        return ShardState(
            shard=self.shard,
            incarnation=self.incarnation,
            cluster_version=self.cluster_version,
            uptime_seconds=self._clock() - self._started,
            unix_seconds=time.time(),
            row_calls=sum(sum(by_seconds) for _, _, by_seconds, *_ in self.engine.call_counts()),
            memory_limit_bytes=0 if (limit := memory_limit()) == UNLIMITED else limit // self._shards_of_process,
            cpu_seconds=time.process_time() / self._shards_of_process,
            tables=self._tables.states(),
        )


def _check_settings(push: UpdateHosted) -> None:
    if push.lr is not None and not (math.isfinite(push.lr) and push.lr >= 0):
        raise InvalidArgument(f"lr is {push.lr!r}; it must be finite and >= 0")
    if not math.isfinite(push.scale):
        raise InvalidArgument(f"scale is {push.scale!r}; it must be finite. Push nothing for a skipped step")


def _bits(rows: npt.NDArray[Any], label: str) -> tuple[npt.NDArray[Any], int]:
    bits, code = ops.as_bits(rows, label)
    if bits.ndim != 2:
        raise InvalidRows(f"{label} has shape {list(bits.shape)}; it must be [N, D]")
    return bits, code
