"""Tables of a cluster: pulls, pushes, assigns and removals of rows by a client.

Cost: one request per shard and operation, all shards at once, in one call of compiled code
(:mod:`~geartrain.ams.client.rows.row_calls`). N ids of a table of dim D take 8·N bytes, their rows itemsize·N·D bytes;
repeated ids are sent once. To and from a shard on this machine the data are in shared memory, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Self, Unpack, cast

import numpy as np
import numpy.typing as npt

from geartrain.ams.client.hosted_calls import HostedCalls
from geartrain.ams.client.rows.expire import ExpiredRows, expire_rows
from geartrain.ams.client.rows.push_options import (
    BATCH_OPTIONS,
    PushOptions,
    StepOptions,
    checked_occurrences,
    clock_of,
)
from geartrain.ams.client.rows.row_calls import WriteOutcome
from geartrain.ams.client.rows.row_futures import PreparedCall
from geartrain.ams.client.rows.table_plan import CHECK_FINITE, CHECK_PRODUCT, NO_CHECK, PushBatch, TablePlan
from geartrain.ams.client.rows.write_log import WriteLog
from geartrain.ams.client.shard_calls import ShardCalls
from geartrain.ams.client.writes import ClientStream, MessageWrite, RowWrite, send_once
from geartrain.ams.kernels import ops
from geartrain.ams.kernels._core import PreparedWrite, ScatteredRows
from geartrain.ams.values.arrays import ids_array, like, rows_array
from geartrain.ams.values.errors import InvalidArgument, TableNotFound
from geartrain.ams.values.expiry.rules import Expiry
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.optimizers.spec import NO_SCALARS
from geartrain.ams.values.placement import NUM_BUCKETS
from geartrain.ams.values.shard_messages import (
    CallContext,
    Describe,
    Done,
    Remove,
    Reply,
    ShardState,
    SyncGroup,
    TableState,
)
from geartrain.ams.values.specs import DTypeName, Ids, TableSpec, checked_wire_dtype
from geartrain.ams.values.text import counted


class Table:
    """A table of the cluster: pull, push, assign, remove. Thread-safe.

    ids are integers [N] in [0, num_rows) (any >= 0 in a hashed table), rows and gradients [N, dim], as numpy arrays or
    torch tensors; results are of the same kind. Once the table was dropped, every method raises TableNotFound, even if
    another exists under its name, unless this process has restored that one.
    """

    def __init__(
        self,
        spec: TableSpec,
        calls: ShardCalls,
        stream: ClientStream,
        wire_dtype: DTypeName | None = None,
        optimizer: RowOptimizerSpec | None = None,
    ) -> None:
        self.spec = spec
        """Spec of the table. Its settings change once this process has heard that they were altered."""
        self.optimizer = spec.optimizer if optimizer is None else spec.optimizer.with_numbers(optimizer)
        """Optimizer with the numbers it was opened with: modules on the table begin with them, whatever the table's
        are."""
        self._calls = calls
        self._stream = stream
        self.wire_dtype = checked_wire_dtype(wire_dtype, spec.name, spec.dtype)
        """Type in which pulled rows and pushed gradients are sent; None: the table's."""
        calls.opened(self)

    def adopt_settings(self, spec: TableSpec) -> None:
        """Continue with the settings of ``spec``: the same table, or one that this process has restored."""
        self.incarnation = self._calls.incarnation_of(spec)
        """Incarnation of the table; after a restore by this process that of the restored one. 0: unknown."""
        self._plan = TablePlan(spec, self.incarnation, self.wire_dtype)
        self.spec = spec

    def __repr__(self) -> str:
        rows = "hashed" if self.spec.num_rows is None else counted(self.spec.num_rows, "row")
        wire = "" if self.wire_dtype is None else f", wire_dtype={self.wire_dtype!r}"
        spec = self.spec
        return f"Table({spec.name!r}, {rows}, dim={spec.dim}, {spec.dtype}, {spec.optimizer}{wire})"

    @property
    def write_log(self) -> WriteLog:
        """Log of the rows that this client writes, of all its tables."""
        return self._calls.rows.write_log

    def with_wire(self, wire_dtype: DTypeName | None) -> Self:
        """Return the same table with rows sent as ``"bfloat16"``, ``"float16"`` or, with None, as they are. Raises
        InvalidArgument.
        """
        return type(self)(self.spec, self._calls, self._stream, wire_dtype, self.optimizer)

    def pull(self, ids: Any) -> Any:
        """Read rows: [N] -> [N, dim] of the table's dtype. A row never written has its initial value; none is created.

        With a ``wire_dtype`` they are rounded to it. Raises InvalidIds, NonFinite (a row is out of its range; the id is
        named), ShardUnavailable, ShardRestarted.
        """
        plan = self._plan
        checked = ids_array(ids, plan.spec.num_rows)
        out = np.empty((len(checked), plan.spec.dim), plan.dtype)
        self._calls.rows.pull(plan, checked, out)
        return out if type(ids) is np.ndarray else like(out, ids)

    def pull_async(self, ids: Any) -> Future[Any]:
        """:meth:`pull` in the background: sent at once if the request is small and shards are other processes."""
        if not self._is_sent_at_once(ids):
            return self._calls.background(self.pull, ids)

        def prepared() -> PreparedCall:
            plan = self._plan
            checked = ids_array(ids, plan.spec.num_rows)
            out = np.empty((len(checked), plan.spec.dim), plan.dtype)
            return self._calls.rows.pull_to_begin(plan, checked, out, partial(like, out, ids))

        return self._calls.rows.start(prepared)

    def present(self, ids: Any) -> npt.NDArray[np.bool_]:
        """Return which rows exist, [N] bool: those that were pushed or assigned."""
        plan = TablePlan(self.spec, self.incarnation, None)
        checked = ids_array(ids, plan.spec.num_rows)
        out = np.empty((len(checked), plan.spec.dim), plan.dtype)
        present = np.zeros(len(checked), np.bool_)
        self._calls.rows.pull(plan, checked, out, present=present)
        return present

    def version(self) -> int:
        """Return the table version: the writes applied to it, assigns included, on the shard with the fewest.

        If every write has all rows of the table (dense ids; shards without rows do not count), rows pulled from now on
        contain that many writes. It continues after a restore. Cost and errors are those of :meth:`versions`.
        """
        return min(self.versions())

    def versions(self) -> tuple[int, ...]:
        """Return the writes applied to the table by each shard, in order; with dense ids only shards that have rows.

        While these are unchanged, no row has changed; the lowest, the table version, may stay while a row changes: an
        abandoned write is on some shards only. Costs one small request per shard. Raises TableNotFound,
        ShardUnavailable, ShardRestarted.
        """
        shards: Sequence[int] = range(self._calls.view.num_shards)
        if self.spec.num_rows is not None:
            # one of every bucket that has any
            first_ids = np.arange(min(self.spec.num_rows, NUM_BUCKETS), dtype=np.int64)
            shards = [shard for shard, _ in self._calls.rows.routes(self._plan, first_ids)]
        return tuple(
            self._state_in(reply).writes for reply in self._calls.read([(shard, Describe()) for shard in shards])
        )

    def _state_in(self, reply: Reply) -> TableState:
        assert isinstance(reply, ShardState)
        for table in reply.tables:
            both = self.incarnation, table.spec.incarnation
            if table.spec.name == self.spec.name and (0 in both or both[0] == both[1]):
                return table
        raise TableNotFound(
            f"shard {reply.shard} has no table {self.spec.name!r} any more, or another of that name: this one was "
            f"dropped. Open the other: cluster.table({self.spec.name!r}), or make its head, dense module or slow gear "
            "anew"
        )

    def pull_into(
        self, ids: Ids, out: npt.NDArray[Any] | ScatteredRows, *, required_sync: SyncGroup | None = None
    ) -> None:
        """Read rows into ``out`` [N, dim] of the table's dtype, C-contiguous, without further copies.

        ``out`` may be rows of several arrays (float32). With ``required_sync``, raises StepMismatch unless exactly the
        group's earlier writes are applied.
        """
        checked = self._checked_pull(ids, out)
        self._calls.rows.pull(self._plan, checked, out, required_sync=required_sync)

    @property
    def state_width(self) -> int:
        """Elements of a row's state, which :func:`pull_together` reads if ``out`` is that wide: the bytes of the row,
        its slots, and an int64 with its number of updates (-1: it does not exist), padded with 0. 0: not available, as
        rows move at steps that do not touch them, or are sent as another type.
        """
        spec = self.spec
        if spec.counts_steps or self.wire_dtype is not None:
            return 0
        return -(-(spec.row_bytes + spec.slot_bytes + 8) // spec.numpy_dtype.itemsize)

    def shards_of(self, ids: Ids) -> list[tuple[int, Ids | None]]:
        """Return each shard that owns some of the ids [N], with their places (None: all of them)."""
        return self._calls.rows.routes(self._plan, ids)

    @property
    def num_shards(self) -> int:
        """Number of shards of the cluster."""
        return self._calls.view.num_shards

    def _checked_pull(self, ids: Ids, out: npt.NDArray[Any] | ScatteredRows) -> Ids:
        checked = ids_array(ids, self.spec.num_rows)
        if isinstance(out, ScatteredRows):
            return checked
        is_array, dtype = isinstance(out, np.ndarray), self._plan.dtype
        if not is_array or out.shape != (len(checked), self.spec.dim) or out.dtype != dtype:
            found = f"{out.dtype} {out.shape}" if is_array else f"a {type(out).__name__}"
            raise InvalidArgument(
                f"out is {found}; it must be a numpy array of {dtype} ({len(checked)}, {self.spec.dim})"
            )
        if not out.flags.carray:
            raise InvalidArgument("out must be writable, aligned and C-contiguous; pass a fresh array")
        return checked

    def pull_into_async(
        self, ids: Ids, out: npt.NDArray[Any], *, required_sync: SyncGroup | None = None
    ) -> Future[None]:
        """:meth:`pull_into` in the background; do not touch ``out`` until the future is done."""
        if not self._is_sent_at_once(ids):
            return self._calls.background(self.pull_into, ids, out, required_sync=required_sync)

        def prepared() -> PreparedCall:
            checked = self._checked_pull(ids, out)
            return self._calls.rows.pull_to_begin(self._plan, checked, out, lambda: None, required_sync=required_sync)

        return self._calls.rows.start(prepared)

    def push(self, ids: Any, gradients: Any, **options: Unpack[PushOptions]) -> Done:
        """Apply gradients with the table's optimizer, exactly once per shard; gradients of equal ids are summed.

        Options are ``lr``, ``scale``, ``optimizer_scalars``, ``group``, ``sequence``, and about the batch
        ``occurrences``, ``step``, ``unix_seconds`` and ``pulled_at``;
        :class:`~geartrain.ams.client.rows.push_options.PushOptions` describes them. Raises InvalidArgument, InvalidIds,
        InvalidRows, NonFinite (nothing changed anywhere), StaleClient, SyncError, ShardUnavailable (whether that shard
        applied it is unknown; :meth:`prepare_push` can be retried), DataPortClosed.
        """
        return send_once(self._pushed(ids, gradients, options))

    def push_async(self, ids: Any, gradients: Any, **options: Unpack[PushOptions]) -> Future[Done]:
        """:meth:`push` in the background; do not touch the arrays until the future is done.

        Blocks while ``max_in_flight_writes`` of the client's are in flight.
        """
        if not self._is_sent_at_once(ids):
            return self._calls.background(self.push, ids, gradients, **options)
        return self._calls.rows.start(lambda: self._pushed(ids, gradients, options).to_begin())

    def prepare_push(
        self,
        ids: Any,
        gradients: Any,
        *,
        step_goes_on: bool = False,
        known_finite: bool = False,
        checked_on_send: bool = False,
        known_distinct: bool = False,
        **options: Unpack[PushOptions],
    ) -> RowWrite:
        """Check and number a push without sending it: the write can be sent again after an error, and is applied once.

        Do not touch the arrays until the write is sent or abandoned.

        Args:
            ids: [N] of the rows.
            gradients: [N, dim]; those of equal ids are summed. Or rows of several arrays, of ascending ids.
            step_goes_on: More pushes of the same step follow; rows that none of them has move once.
            known_finite: The caller has checked for NaN and infinity; else a pass over the gradients does.
            checked_on_send: Leave that check to a shard that gets all rows of the push; sending then
                raises NonFinite, and no shard has applied them.
            known_distinct: No id occurs twice; else duplicates are merged here, a look at each.
            options: Those of :meth:`push`.

        Raises the errors of :meth:`push` from before sending.
        """
        check = CHECK_PRODUCT if known_finite else None if checked_on_send else CHECK_FINITE
        same = {"step_goes_on": step_goes_on, "are_distinct": known_distinct}
        return self._pushed(ids, gradients, options, check, **same, is_held=True)

    def _pushed(
        self,
        ids: Any,
        gradients: Any,
        options: PushOptions,
        check: int | None = None,
        *,
        step_goes_on: bool = False,
        are_distinct: bool = False,
        is_held: bool = False,
    ) -> RowWrite:
        """Return a checked, split and numbered push; ``check`` None: the checks of one that is sent at once."""
        plan, calls = self._plan, self._calls
        lr, scale, scalars, group = plan.settings_of(options)
        checked = ids_array(ids, plan.spec.num_rows)
        rows, code = gradients, 0
        if not isinstance(gradients, ScatteredRows):
            rows = rows_array(gradients, len(checked), plan.spec.dim)
            if rows.dtype != np.float32:
                rows, code = ops.as_bits(rows)
        if check is None:
            # All or nothing: a shard checks its rows, so a push to a single shard need not be checked twice.
            check = NO_CHECK if calls.view.num_shards == 1 and group is None else CHECK_FINITE
        batch: PushBatch | None = None
        if plan.asks_for_batch or not BATCH_OPTIONS.isdisjoint(options):
            occurrences = checked_occurrences(options.get("occurrences"), len(checked))
            batch = plan.batch(occurrences, *clock_of(options), options.get("pulled_at"))
        prepared = PreparedWrite(
            *(calls.client, plan.facts, checked, rows, code),
            is_assign=False,
            check=check,
            lr=lr,
            scale=scale,
            scalars=scalars,
            group=group,
            step_goes_on=step_goes_on,
            every_shard=group is not None or plan.counts_steps,  # they count ranks, or steps
            are_distinct=are_distinct,
            batch=batch,
        )
        numbers = self._stream.numbers(plan.spec.name, options.get("sequence"))
        return RowWrite(calls.rows, numbers, [plan], [prepared], [checked], group, is_held=is_held)

    def _is_sent_at_once(self, ids: Any) -> bool:
        # Replies count as much as requests: one thread copies all of them to their arrays.
        return self._calls.rows.is_sent_at_once((8 + self.spec.row_bytes) * _count(ids))

    def assign(self, ids: Any, rows: Any, *, sequence: int | None = None) -> Done:
        """Overwrite rows [N, dim] of the table's dtype; their slots become zero. ids must be distinct. Rows are sent
        unrounded, whatever the ``wire_dtype``.

        ``sequence`` numbers the write as in :meth:`push`. Raises InvalidIds, InvalidRows, NonFinite, StaleClient,
        ShardUnavailable.
        """
        plan, calls = self._plan, self._calls
        checked = ids_array(ids, plan.spec.num_rows)
        values, code = ops.as_bits(rows_array(rows, len(checked), plan.spec.dim, dtype=plan.dtype))
        ops.require_distinct(checked)
        prepared = PreparedWrite(
            *(calls.client, plan.facts, checked, values, code),
            is_assign=True,
            check=CHECK_FINITE,
            lr=None,
            scale=1.0,
            scalars=NO_SCALARS,
            group=None,
            step_goes_on=False,
            every_shard=False,
        )
        numbers = self._stream.numbers(plan.spec.name, sequence)
        return send_once(RowWrite(calls.rows, numbers, [plan], [prepared], [checked]))

    def remove(self, ids: Any, *, sequence: int | None = None) -> int:
        """Remove rows, exactly once per shard; return their number.

        They are then like rows that were never written: they read as their initial values, and a push starts from
        those, without slots. ids [N] may repeat; ids without a row are skipped. ``sequence`` numbers the write as in
        :meth:`push`; a removal of more than ``part_bytes`` of ids is several writes, and cannot have one. Raises
        InvalidArgument, InvalidIds, StaleClient, ShardUnavailable (whether rows of that shard were removed is unknown).
        """
        checked = ids_array(ids, self.spec.num_rows)
        most = max(1, self._calls.config.part_bytes // checked.itemsize)
        if sequence is not None and len(checked) > most:
            raise InvalidArgument(
                f"sequence {sequence} is that of one write, and {len(checked)} ids to remove are several; give at most "
                f"{most} at once"
            )
        return sum(self._remove(checked[start : start + most], sequence) for start in range(0, len(checked), most))

    def _remove(self, ids: Ids, sequence: int | None) -> int:
        plan, calls = self._plan, self._calls
        requests = {
            shard: Remove(table=plan.spec.name, ids=ids if places is None else ids[places])
            for shard, places in self.shards_of(ids)
        }

        def deliver(shards: Sequence[int], context: CallContext) -> list[WriteOutcome]:
            return cast("list[WriteOutcome]", calls.deliver([(n, requests[n]) for n in shards], context))

        numbers, log = self._stream.numbers(plan.spec.name, sequence), calls.rows.write_log
        return send_once(MessageWrite(numbers, list(requests), deliver, plan, log=log, ids=ids)).created

    def expire(
        self,
        rule: Expiry | None = None,
        *,
        dry_run: bool = False,
        progress: Callable[[ExpiredRows], None] | None = None,
    ) -> ExpiredRows:
        """Scan all rows now and remove those that a rule, by default the table's ``expiry``, selects; with ``dry_run``
        count them.

        Shards scan block by block, and answer other requests in between; ``progress`` receives the counts so far after
        each. Raises InvalidArgument (there is no rule, or it needs data that the table does not keep), ShardUnavailable
        (some rows were removed; call it again).
        """
        context = replace(self._stream.caller or CallContext(), table_incarnation=self.incarnation)
        ask, num_shards = partial(self._calls.read, context=context), self._calls.view.num_shards
        return expire_rows(ask, self.spec.name, num_shards, rule, dry_run=dry_run, progress=progress)

    def hosted(self, model: str) -> HostedCalls:
        """Return the calls to a hosted model beside this table's rows (:mod:`geartrain.ams.programs.hosted`)."""
        return HostedCalls(lambda: self._plan, model, self._calls, self._stream)


def pull_together(pulls: Sequence[tuple[Table, Ids, npt.NDArray[Any]]]) -> list[list[int]]:
    """Run :meth:`Table.pull_into` for several tables; tables of one cluster share one request to each shard.

    Each is (table, distinct ids [N] in its range, out [N, dim] of its dtype), both C-contiguous. An ``out`` of
    [N, ``table.state_width``] gets the states. Returns, for each table, the writes that every shard had applied to it
    (a push's ``pulled_at``); -1: not asked, or unknown. Raises as pull_into, but ValueError for other arrays.
    """
    clusters = dict.fromkeys([table._calls.rows for table, _, _ in pulls])
    if len(clusters) == 1:
        return next(iter(clusters)).pull_together([(table._plan, ids, out) for table, ids, out in pulls])
    writes: list[list[int]] = [[]] * len(pulls)
    for rows in clusters:
        places = [place for place, (table, _, _) in enumerate(pulls) if table._calls.rows is rows]
        for place, its in zip(places, pull_together([pulls[place] for place in places]), strict=True):
            writes[place] = its
    return writes


def prepare_pushes(
    tables: Sequence[Table],
    ids: Sequence[Ids],
    gradients: Sequence[npt.NDArray[np.float32]],
    *,
    occurrences: Sequence[npt.NDArray[np.uint32] | None] | None = None,
    pulled_at: Sequence[Sequence[int] | None] | None = None,
    **options: Unpack[StepOptions],
) -> RowWrite:
    """Prepare :meth:`Table.prepare_push` of several tables of one cluster and optimizer as one write: split and
    numbered at once, and sent in one request to each shard.

    Args:
        tables: The tables, each once.
        ids: Ids for each table [N], distinct, in its range and C-contiguous.
        gradients: Gradients for each table [N, dim], finite and C-contiguous.
        occurrences: Each table's [N], as in :class:`~geartrain.ams.client.rows.push_options.PushOptions`, C-contiguous;
            None: unknown.
        pulled_at: For each table, as in PushOptions.
        options: Shared by all tables.

    Raises as prepare_push; then no number is used.
    """
    plans, calls = [table._plan for table in tables], tables[0]._calls
    lr, scale, scalars, group = plans[0].settings_of(options)
    step, seconds = clock_of(options)
    nothing = [None] * len(plans)
    prepared = calls.client.prepare_pushes(
        [
            (
                *(plan.facts, own, rows, 0, group is not None or plan.counts_steps),
                plan.batch(counts, step, seconds, at) if plan.asks_for_batch else (None, None, None, at),
            )
            for plan, own, rows, counts, at in zip(
                plans, ids, gradients, occurrences or nothing, pulled_at or nothing, strict=True
            )
        ],
        *(lr, scale, scalars, group),
    )
    numbers = tables[0]._stream.numbers(plans[0].spec.name, None)
    return RowWrite(calls.rows, numbers, plans, prepared, ids, group, is_held=True)


def next_step(tables: Sequence[Table]) -> int:
    """Return the step after the largest that a push to any of these tables of one cluster reported; 0: none did.

    Costs one small request per shard. Raises as :meth:`Table.versions`.
    """
    calls = tables[0]._calls
    replies = calls.read([(shard, Describe()) for shard in range(calls.view.num_shards)])
    return max(table._state_in(reply).next_step for reply in replies for table in tables)


def _count(ids: Any) -> int:
    """Return the number of ids; 0 if these are none, which later checks report."""
    try:
        return len(ids)
    except TypeError:
        return 0
