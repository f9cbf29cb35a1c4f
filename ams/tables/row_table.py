"""Table of one shard: its rows, dense (ids below ``num_rows``, no index) or hashed.

Shapes: N ids of one call, M rows of an output array, D = ``TableSpec.dim``. One thread at a time uses a table, the one
that has the shard's turn; a second thread's push or assign waits. Calls release the GIL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels import ops
from geartrain.ams.kernels._core import Refused as Refusal
from geartrain.ams.kernels._core import RowStore, ServedTable
from geartrain.ams.tables.compiled_store import ELAPSED_WINDOW, store_spec
from geartrain.ams.tables.counted_ids import CountedIds, RefusedCounts
from geartrain.ams.tables.moments import MomentIndex
from geartrain.ams.tables.row_checks import checked_factors, checked_gradients, checked_state, require_rows
from geartrain.ams.tables.stored_rows import LIFE, StoredRows, life_bytes
from geartrain.ams.values.admission.rules import MinCount
from geartrain.ams.values.errors import Busy, InvalidArgument, InvalidRows
from geartrain.ams.values.optimizers.spec import NO_SCALARS
from geartrain.ams.values.shard_messages import BatchFacts
from geartrain.ams.values.specs import Ids, TableSpec

_MAX_REMOVED = 1 << 20
_BUSY_SECONDS = 1.0


class TableSteps(NamedTuple):
    """Step counter of a table whose untouched rows move. JSON values."""

    now: int
    """Number of steps that have ended."""
    lrs: list[float]
    """Learning rates of the last steps, the latest at the end."""
    origin: tuple[float, float]
    """Factors of the initial value that give row and slot of a row that was never written, after all steps."""


class TableClock(NamedTuple):
    """Clock of a table: the largest step and time in its pushes. JSON values."""

    step: int
    """Step of a worker."""
    seconds: int
    """Unix time in seconds by a worker's clock."""


class RowTable:
    """Rows, slots and initial values of the owned buckets of a table.

    Pull creates nothing. Push and assign check everything first: whatever they raise, no row has changed.

    Args:
        spec: What the table is.
        owned_buckets: int64 [K], ascending, within [0, 4096): the buckets whose ids live here.
        threads: Most threads that work on one request; a second one joins at 2 MiB of rows.
        window: Where untouched rows move: steps after which a row is caught up at the latest, >= 4. A push looks at
            4 / window of all rows for old ones, and a request costs a product of 2 x 2 matrices per step back to the
            oldest row that it names.

    Raises:
        InvalidArgument: the buckets are not ascending, or an initial value does not fit the storage type.
    """

    def __init__(self, spec: TableSpec, owned_buckets: Ids, *, threads: int = 1, window: int = ELAPSED_WINDOW) -> None:
        owned = ops.checked_ids(np.asarray(owned_buckets), "owned_buckets")
        if len(owned) and (owned[0] < 0 or owned[-1] >= ops.NUM_BUCKETS or np.any(np.diff(owned) <= 0)):
            raise InvalidArgument(f"owned_buckets must ascend within [0, {ops.NUM_BUCKETS}); it is {owned}")
        self.spec = spec
        self.owned_buckets = owned
        self._threads, self._window = threads, window
        self._store = RowStore(store_spec(spec, owned, threads, window))
        _require_usable(spec, self._store.max_rows if len(owned) else 1)
        self.moments = MomentIndex(self._store.forget_moment, self._store.knows_moment)
        """Snapshots and exports since which the table knows its written rows. Set by freezes and restores."""
        self.served = ServedTable(
            name=spec.name,
            incarnation=spec.incarnation,
            rows=self._store,
            lr=spec.optimizer.lr,
            optimizer=spec.optimizer.name,
            scalars=spec.optimizer.scalars(),
            fixed=dict(spec.optimizer.fixed_scalars),
            is_open=True,
        )
        """The table as the shard's engine serves it."""
        self._is_frozen = False
        self._code = ops.DTYPE_CODES[spec.numpy_dtype]

    def alter(self, spec: TableSpec) -> int:
        """Change the settings to those of ``spec``; return the number of rows evicted for it.

        Raises MemoryError, and as :meth:`check_alter`.
        """
        self.check_alter(spec)
        gone = self._store.alter(store_spec(spec, self.owned_buckets, self._threads, self._window))
        self.spec = spec
        optimizer = spec.optimizer
        self.served.alter(
            lr=optimizer.lr,
            optimizer=optimizer.name,
            scalars=optimizer.scalars(),
            fixed=dict(optimizer.fixed_scalars),
        )
        return gone

    def check_alter(self, spec: TableSpec) -> None:
        """Raise InvalidArgument for settings that cannot be, Busy while a freeze holds what they would change."""
        is_limited = spec.max_bytes is not None and len(self.owned_buckets)
        wanted = store_spec(spec, self.owned_buckets, self._threads, self._window)
        _require_usable(spec, RowStore(wanted).max_rows if is_limited else 1)
        if self._is_frozen and not self.spec.keeps_same(spec):
            raise Busy(
                f"table {spec.name!r} is in a snapshot or export that is being written, and what is kept beside its "
                "rows cannot change meanwhile; alter it when that is whole",
                _BUSY_SECONDS,
            )

    @property
    def num_present(self) -> int:
        """Number of rows that were pushed or assigned."""
        return self._store.num_present

    @property
    def torn(self) -> str:
        """Reason why the rows are inconsistent, after a write in parts was cut off; else empty."""
        return self.served.torn

    @torn.setter
    def torn(self, why: str) -> None:
        self.served.torn = why

    @property
    def memory_bytes(self) -> int:
        """Bytes of the rows, slots, index, admission filter, reserves, and the copies of freezes.

        At most twice the bytes of the rows for a dense table, and 8 bytes for each of its ids.
        """
        return sum(self.memory_parts.values())

    @property
    def memory_parts(self) -> dict[str, int]:
        """Return :attr:`memory_bytes` by purpose: rows, slots, lives, index of ids, snapshots, admission."""
        counted = self._store.refused()
        rows, slots, index, snapshots = self._store.memory_parts()
        admission = 0 if counted is None else counted[3]
        return {"rows": rows, "slots": slots, "index": index, "snapshots": snapshots, "admission": admission}

    @property
    def refused(self) -> RefusedCounts:
        """Gradients and occurrences that were not admitted since the table was created here."""
        counted = self._store.refused()
        return RefusedCounts() if counted is None else RefusedCounts(*counted[:3])

    def frozen_admission(self, start: int = 0, most_bytes: int = 2**62) -> tuple[CountedIds, int] | None:
        """Return the counters of admission at the moment of the freeze, about ``most_bytes`` of them from a range on,
        and the next range, -1 at the end. None: the table admits every id. Any thread, while it is frozen.
        """
        counted = self._store.frozen_admission(start, most_bytes)
        if counted is None:
            return None
        num_pushes, ranges, counters, waiting, following = counted
        arrays = np.asarray(ranges, np.int64), counters, np.asarray(waiting, np.int64)
        return CountedIds(num_pushes, *arrays), following

    def restore_admission(self, counted: CountedIds, owned: npt.NDArray[np.bool_]) -> None:
        """Load the counters that :meth:`frozen_admission` returned, of any shard's part of the table, for the buckets
        marked in ``owned`` [4096].

        A counter that is here already becomes the larger of both. Raises InvalidArgument for another filter,
        MemoryError.
        """
        admission = self.spec.admission
        if isinstance(admission, MinCount):
            counted = counted.of_buckets(owned, admission.num_ranges)
        try:
            self._store.restore_admission(
                counted.num_pushes, counted.ranges.tolist(), counted.counters, counted.waiting.tolist()
            )
        except ValueError as exc:
            raise InvalidArgument(f"this is not what table {self.spec.name!r} has counted: {exc}") from exc

    def pull(self, ids: Ids, out: npt.NDArray[Any], present: npt.NDArray[np.bool_] | None = None) -> None:
        """Write the row of ``ids[i]`` to ``out[i]``; an absent row yields its initial value.

        Args:
            ids: int64 [N], repeats allowed.
            out: [M, D] of the table's dtype, C-contiguous, M >= N.
            present: bool [M] or None; its first N are set to whether the row exists.

        Raises:
            InvalidIds: an id is negative, out of range, or of a bucket that is not owned.
            InvalidRows: ``out`` or ``present`` do not fit. ``out`` is untouched.
        """
        ids = ops.checked_ids(ids)
        require_rows(self.spec, out, None, "out", self.spec.numpy_dtype)
        if not out.flags.carray:
            raise InvalidRows("out must be writable, aligned and C-contiguous; pass a fresh array")
        if len(ids) > len(out):
            raise InvalidRows(f"{len(out)} rows of out for {len(ids)} ids; there must be one per id")
        if present is not None and (
            present.dtype != np.bool_ or present.shape != (len(out),) or not present.flags.carray
        ):
            raise InvalidRows(
                f"present is {present.dtype} {list(present.shape)}; it must be a writable bool [{len(out)}]"
            )
        bits = out if self._code == 0 else out.view(np.uint16)
        try:
            self._store.pull(ids, bits, None if present is None else present.view(np.uint8))
        except Refusal as refused:
            self._refuse(refused, ids)

    def push(
        self,
        ids: Ids,
        gradients: npt.NDArray[Any],
        *,
        lr: float | None = None,
        scale: float = 1.0,
        optimizer_scalars: Mapping[str, float] = NO_SCALARS,
        ends_step: bool = True,
        batch: BatchFacts | None = None,
    ) -> int:
        """Apply the optimizer to the rows of ``ids``, creating absent ones from their initial values.

        Args:
            ids: int64 [N], distinct.
            gradients: [N, D], float32, float16 or bfloat16.
            lr: Learning rate of this push, finite and >= 0; None: that of the table.
            scale: Finite factor of the gradients.
            optimizer_scalars: Numbers of the optimizer for this push: see :meth:`RowOptimizerSpec.for_push`.
            ends_step: Where untouched rows move: whether the step, of this push and those before it that did not end
                one, is over. A row pushed twice within a step has the sum of both gradients.
            batch: What the push says of its batch: occurrences, step and time.

        Returns:
            The number of rows created.

        Raises:
            InvalidIds: as for :meth:`pull`.
            InvalidRows: ``gradients`` is not [N, D].
            NonFinite: a scaled gradient is NaN or infinite, or an updated value would be infinite in its storage type.
            InvalidArgument: ``lr``, ``scale`` or an optimizer's number is out of range, or cannot change.
            MemoryError: new rows do not fit.
            TableFull: they do not fit below the table's ``max_bytes``.
        """
        optimizer, lr = checked_factors(self.spec, lr, scale, optimizer_scalars)
        ids, bits, code = checked_gradients(self.spec, ids, gradients)
        try:
            return self._store.push(ids, bits, code, optimizer, lr, scale, ends_step, batch)
        except Refusal as refused:
            self._refuse(refused, ids, f"gradients (times scale {scale!r})")

    def end_step(self, *, lr: float | None = None) -> None:
        """End a step of pushes that did not (``ends_step=False``): rows that none of them had move now.

        ``lr`` is that of its pushes. Without effect where untouched rows are frozen. Raises InvalidArgument,
        MemoryError.
        """
        self.push(np.empty(0, np.int64), np.empty((0, self.spec.dim), np.float32), lr=lr)

    def check_push(
        self,
        ids: Ids,
        gradients: npt.NDArray[Any],
        *,
        lr: float | None = None,
        scale: float = 1.0,
        optimizer_scalars: Mapping[str, float] = NO_SCALARS,
    ) -> None:
        """Raise what :meth:`push` would raise, MemoryError left out; change nothing."""
        optimizer, lr = checked_factors(self.spec, lr, scale, optimizer_scalars)
        ids, bits, code = checked_gradients(self.spec, ids, gradients)
        try:
            self._store.check_push(ids, bits, code, optimizer, lr, scale)
        except Refusal as refused:
            self._refuse(refused, ids, f"gradients (times scale {scale!r})")

    def cannot_overflow(
        self,
        largest: float,
        *,
        lr: float | None = None,
        scale: float = 1.0,
        optimizer_scalars: Mapping[str, float] = NO_SCALARS,
    ) -> bool:
        """Return whether no push of gradients of at most ``largest`` in magnitude can raise NonFinite.

        By bounds of all rows and slots, in O(1): False does not mean that one would. Raises InvalidArgument as
        :meth:`push`.
        """
        optimizer, lr = checked_factors(self.spec, lr, scale, optimizer_scalars)
        with np.errstate(over="ignore"):
            bound = float(np.float32(largest))
        return bool(np.isfinite(bound)) and self._store.cannot_overflow(bound, optimizer, lr, scale)

    def reserve(self, ids: Ids) -> None:
        """Reserve the memory of a push to ``ids`` [N]. Raises InvalidIds, MemoryError."""
        ids = ops.checked_ids(ids)
        try:
            self._store.make_room(ids)
        except Refusal as refused:
            self._refuse(refused, ids)

    def reserve_copies(self, count: int) -> None:
        """Reserve the memory in which a freeze keeps copies of ``count`` rows to be written, and of those that the end
        of the step moves. Raises MemoryError."""
        self._store.make_room_to_keep(count)

    def assign(self, ids: Ids, rows: npt.NDArray[Any]) -> int:
        """Overwrite the rows of ``ids`` and zero their slots.

        Args:
            ids: int64 [N], distinct.
            rows: [N, D] of the table's dtype.

        Returns:
            The number of rows created.

        Raises:
            InvalidIds, InvalidRows, MemoryError: as for :meth:`push`.
            NonFinite: a value is NaN or infinite.
        """
        ids = ops.checked_ids(ids)
        require_rows(self.spec, rows, len(ids), "rows", self.spec.numpy_dtype)
        bits, _ = ops.as_bits(rows)
        try:
            return self._store.assign(ids, bits)
        except Refusal as refused:
            self._refuse(refused, ids, "rows")

    def remove(self, ids: Ids) -> int:
        """Remove rows and their slots: they are as never written.

        A hashed table reuses the memory for new rows, a dense one keeps it for these. ``ids`` int64 [N] may repeat, and
        ids without a row are skipped. Returns the number of removed rows. Raises InvalidIds, MemoryError; then none
        is removed.
        """
        ids = ops.checked_ids(ids)
        try:
            return self._store.remove(ids)
        except Refusal as refused:
            self._refuse(refused, ids)

    @property
    def clock(self) -> TableClock:
        """Largest step and time in pushes so far."""
        return TableClock(*self._store.clock)

    def advance_clock(self, clock: TableClock) -> None:
        """Advance the clock to ``clock``, if that is later."""
        self._store.advance_clock(*clock)

    @property
    def has_undated(self) -> bool:
        """Whether some rows are older than the table's record of pushes: they count as seen when its clock begins."""
        return self._store.has_undated

    def adopt_undated(self) -> None:
        """Record, before :meth:`advance_clock`, that restored rows may be so."""
        self._store.adopt_undated()

    def pop_clock_jump(self) -> TableClock:
        """Return the largest advance of each number of the clock by one push since the last call."""
        return TableClock(*self._store.pop_leap())

    @property
    def num_evicted(self) -> int:
        """Number of rows evicted since the table was created here."""
        return self._store.num_evicted

    def read_lives(self, position: int, most: int) -> tuple[Ids, npt.NDArray[Any] | None, int]:
        """Return the ids [N] of at most ``most`` rows from ``position`` on, their lives [N] (None: the table keeps
        none), and the next position, -1 at the end. Rows are in order of creation, or of ids in a dense table.
        """
        ids, lives = np.empty(most, np.int64), np.empty(most, LIFE) if self.spec.keeps_lives else None
        count, position = self._store.read_lives(position, ids, life_bytes(lives))
        return ids[:count], None if lives is None else lives[:count], position

    @property
    def latest_moment(self) -> int:
        """Number of the last known moment: of a freeze, of :meth:`record_moment`, or 0 for the creation of the table;
        -1: all are forgotten."""
        return self._store.latest_moment

    def record_moment(self) -> int:
        """Record the present moment for :meth:`freeze`; return its number."""
        return self._store.record_moment()

    def freeze(self, *, since: int | None = None) -> int:
        """Freeze the rows as they are for :meth:`read_frozen`, while writes go on (copy on write); return their number.

        With ``since`` only the rows written since that moment. :attr:`latest_moment` is the number of this one. Costs
        a bit per row now, and a copy of each row that is written before it was read. Raises ValueError if the table is
        frozen already, or does not know the moment.
        """
        num_rows = self._store.freeze(since)
        self._is_frozen = True
        return num_rows

    def read_frozen(
        self, most: int, buckets: npt.NDArray[np.bool_] | None = None, *, out: StoredRows | None = None
    ) -> StoredRows:
        """Return up to ``most`` frozen rows that were not read yet, N = 0 at the end; with ``buckets`` [4096] only rows
        of the marked buckets.

        The order is that of creation, or of ids for a dense table. Other buckets than in the call before cost a check
        of every unread row. ``out`` is memory for at least ``most`` rows (:meth:`StoredRows.empty`), without the parts
        that are not wanted; None: fresh memory.
        """
        found = (StoredRows.empty(self.spec, most) if out is None else out).between(0, most)
        ids, rows, slots, steps, lives = found
        row_bits, slot_bits = ops.as_bits(rows)[0], None if slots is None else ops.as_bits(slots)[0]
        wanted = None if buckets is None else buckets.view(np.uint8)
        num = 0
        while num == 0:  # each call looks at a bounded number of rows, and lets writers in after it
            num = self._store.read_frozen(ids, row_bits, slot_bits, steps, wanted, life_bytes(lives))
        return found.between(0, max(num, 0))

    def frozen_removed(self, most: int = _MAX_REMOVED) -> Iterator[Ids]:
        """Yield the ids of rows removed between the moment ``since`` of :meth:`freeze` and the freeze, in arrays of at
        most ``most``. An id that has a row again may be among them: its row is among the frozen ones.
        """
        start = 0
        while True:
            ids = np.empty(most, np.int64)
            count = self._store.read_frozen_removed(start, ids)
            if not count:
                return
            yield ids[:count]
            start += count

    def thaw(self, *, kept: bool) -> None:
        """End the freeze; without ``kept``, as its rows were not saved, forget its moment."""
        self._store.thaw(kept)
        self._is_frozen = False

    def restore(
        self,
        ids: Ids,
        rows: npt.NDArray[Any],
        slots: npt.NDArray[Any] | None,
        steps: Ids | None = None,
        lives: npt.NDArray[Any] | None = None,
    ) -> int:
        """Write rows [N, D], slots [N, slot_dim], steps [N] and lives [N] of :meth:`read_frozen`.

        Returns the number of rows created.

        They do not count as written since any moment. 16-bit rows of an export have no steps: these are 0. If they
        exceed ``max_bytes``, the rows that come first in the order of eviction are left out. Raises as
        :meth:`assign`.
        """
        ids = ops.checked_ids(ids)
        require_rows(self.spec, rows, len(ids), "rows", self.spec.numpy_dtype)
        steps = checked_state(self.spec, len(ids), slots, steps, lives)
        try:
            return self._store.restore(
                ids,
                ops.as_bits(rows)[0],
                None if slots is None else ops.as_bits(slots, "slots")[0],
                None if steps is None else ops.checked_ids(steps, "steps"),
                life_bytes(lives),
            )
        except Refusal as refused:
            self._refuse(refused, ids, "rows")

    @property
    def steps(self) -> TableSteps | None:
        """Step counter of the table; None where untouched rows are frozen."""
        if not self.spec.counts_steps:
            return None
        now, lrs, row_factor, slot_factor = self._store.step_state()
        return TableSteps(now, lrs, (row_factor, slot_factor))

    def adopt_steps(self, steps: TableSteps) -> None:
        """Continue from ``steps``, the value of :attr:`steps` where the restored rows were frozen.

        Raises InvalidArgument for an impossible value.
        """
        try:
            self._store.adopt_steps(steps.now, list(steps.lrs), *steps.origin)
        except ValueError as exc:
            raise InvalidArgument(f"these are no steps of table {self.spec.name!r}: {exc}") from exc

    def _refuse(self, refused: Refusal, values: Ids, label: str = "out") -> NoReturn:
        reason, index = refused.args
        raise self.served.refusal(reason, index, int(values[index]), label) from None


def _require_usable(spec: TableSpec, max_rows: int) -> None:
    """Raise InvalidArgument for a ``max_bytes`` below one row, and for an expiry rule that cannot be evaluated."""
    if max_rows < 1:
        raise InvalidArgument(
            f"max_bytes of table {spec.name!r} is {spec.max_bytes}, and a shard's share of it holds no row of "
            f"{spec.row_bytes + spec.slot_bytes + spec.step_bytes + spec.life_bytes} bytes and its index; raise it"
        )
    if spec.expiry is not None:
        spec.expiry.require_usable()
