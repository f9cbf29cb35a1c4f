"""The rows of one table on one shard, dense (ids below ``num_rows``, no index) or hashed.

Shapes: N ids of one call, M rows of an output array, D = ``TableSpec.dim``. One thread at a time uses a table:
whoever has the shard's turn. A second thread's push or assign waits for the first rather than corrupt anything. Calls
release the GIL.
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
from geartrain.ams.tables.counted_ids import CountedIds, Refused
from geartrain.ams.tables.moments import KnownMoments
from geartrain.ams.tables.row_checks import checked_factors, checked_gradients, checked_state, require_rows
from geartrain.ams.tables.stored_rows import LIFE, StoredRows, life_bytes
from geartrain.ams.values.admission.rules import MinCount
from geartrain.ams.values.errors import Busy, InvalidArgument, InvalidRows
from geartrain.ams.values.optimizers.spec import NO_SCALARS
from geartrain.ams.values.shard_messages import BatchFacts
from geartrain.ams.values.specs import Ids, TableSpec

_MOST_REMOVED = 1 << 20
_BUSY_SECONDS = 1.0


class TableSteps(NamedTuple):
    """The steps of a table whose untouched rows move: what its rows' last steps count in. JSON values."""

    now: int
    """Steps that have ended."""
    lrs: list[float]
    """Learning rates of the last of them, the latest at the end."""
    origin: tuple[float, float]
    """What all of them do to a row that was never written: factors of its initial value that give row and slot."""


class TableClock(NamedTuple):
    """The time of a table: what pushes said. JSON values."""

    step: int
    """Of a worker."""
    seconds: int
    """Since 1970, by a worker's clock."""


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
        _require_usable(spec, self._store.most_rows if len(owned) else 1)
        self.moments = KnownMoments(self._store.forget_moment, self._store.knows_moment)
        """Snapshots and exports that hold every row but those written since. Set by who freezes and restores."""
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
        """The same rows as a shard's engine serves them."""
        self._code = ops.DTYPE_CODES[spec.numpy_dtype]

    def alter(self, spec: TableSpec) -> int:
        """Go on as ``spec``, the same table with other settings; return how many rows went for lack of room.

        Raises InvalidArgument, MemoryError, and Busy while a freeze holds what ``spec`` would keep otherwise.
        """
        wanted = store_spec(spec, self.owned_buckets, self._threads, self._window)
        is_limited = spec.max_bytes is not None and len(self.owned_buckets)
        _require_usable(spec, RowStore(wanted).most_rows if is_limited else 1)
        gone = self._store.alter(wanted)
        if gone < 0:
            raise Busy(
                f"table {spec.name!r} is in a snapshot or export that is being written, and what is kept beside its "
                "rows cannot change meanwhile; alter it when that is whole",
                _BUSY_SECONDS,
            )
        self.spec = spec
        optimizer = spec.optimizer
        self.served.alter(
            lr=optimizer.lr,
            optimizer=optimizer.name,
            scalars=optimizer.scalars(),
            fixed=dict(optimizer.fixed_scalars),
        )
        return gone

    @property
    def num_present(self) -> int:
        """Rows that were pushed or assigned."""
        return self._store.num_present

    @property
    def torn(self) -> str:
        """Why its rows are of no one moment, if a write was cut off; else empty. Set by who writes in pieces."""
        return self.served.torn

    @torn.setter
    def torn(self, why: str) -> None:
        self.served.torn = why

    @property
    def memory_bytes(self) -> int:
        """Bytes of the rows, their slots and the index, of the room beside them, and of what freezes copied aside.

        Of a dense table at most twice what its rows take, and 8 bytes for each of its ids. With the filter of its
        admission.
        """
        return sum(self.memory_parts.values())

    @property
    def memory_parts(self) -> dict[str, int]:
        """:attr:`memory_bytes` by what they are for: rows, their slots and lives, the index of ids, what snapshots hold
        and know, and admission."""
        counted = self._store.refused()
        rows, slots, index, snapshots = self._store.memory_parts()
        admission = 0 if counted is None else counted[3]
        return {"rows": rows, "slots": slots, "index": index, "snapshots": snapshots, "admission": admission}

    @property
    def refused(self) -> Refused:
        """What was not admitted: gradients and occurrences since the table was made here."""
        counted = self._store.refused()
        return Refused() if counted is None else Refused(*counted[:3])

    def frozen_admission(self, start: int = 0, most_bytes: int = 2**62) -> tuple[CountedIds, int] | None:
        """What admission had counted at the moment of the freeze, about ``most_bytes`` of it from a range on, and the
        range to go on at, -1: that was all. None: the table admits every id. Any thread, while it is frozen.
        """
        counted = self._store.frozen_admission(start, most_bytes)
        if counted is None:
            return None
        num_pushes, ranges, counters, waiting, following = counted
        arrays = np.asarray(ranges, np.int64), counters, np.asarray(waiting, np.int64)
        return CountedIds(num_pushes, *arrays), following

    def restore_admission(self, counted: CountedIds, owned: npt.NDArray[np.bool_]) -> None:
        """Take up what :meth:`frozen_admission` gave, of this table or of another shard's part of it: what is of the
        buckets that are marked in ``owned`` [4096].

        Of a range that is here already each counter becomes the higher one. Raises InvalidArgument if it is of another
        filter, MemoryError.
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
        """Write the row of ``ids[i]`` to ``out[i]``; a row that is not there yields its initial value.

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
        """Apply the optimizer to the rows of ``ids``, creating those that are not there from their initial values.

        Args:
            ids: int64 [N], distinct.
            gradients: [N, D], float32, float16 or bfloat16.
            lr: Learning rate of this push, finite and >= 0; None: that of the table.
            scale: Finite factor of the gradients.
            optimizer_scalars: Numbers of the optimizer that this push replaces: see :meth:`RowOptimizerSpec.for_push`.
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
        """Tell whether no push of gradients of at most ``largest`` in magnitude can raise NonFinite.

        From bounds of all rows and slots: O(1) work, and False does not mean that one would. Raises InvalidArgument as
        :meth:`push`.
        """
        optimizer, lr = checked_factors(self.spec, lr, scale, optimizer_scalars)
        with np.errstate(over="ignore"):
            bound = float(np.float32(largest))
        return bool(np.isfinite(bound)) and self._store.cannot_overflow(bound, optimizer, lr, scale)

    def make_room(self, ids: Ids) -> None:
        """Reserve the memory that a push to ``ids`` [N] takes. Raises InvalidIds, MemoryError."""
        ids = ops.checked_ids(ids)
        try:
            self._store.make_room(ids)
        except Refusal as refused:
            self._refuse(refused, ids)

    def make_room_to_keep(self, count: int) -> None:
        """Reserve what a freeze under way takes to keep ``count`` rows that are written, and those that the end of the
        step moves. Raises MemoryError."""
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
        """Take rows out: from now on they are as rows that were never written, slots and all.

        The memory of a hashed table's is used by rows that come, that of a dense table's is kept for them. ``ids``
        int64 [N] may repeat, and those that have no row are passed over. Returns how many rows went. Raises InvalidIds,
        MemoryError; then none did.
        """
        ids = ops.checked_ids(ids)
        try:
            return self._store.remove(ids)
        except Refusal as refused:
            self._refuse(refused, ids)

    @property
    def clock(self) -> TableClock:
        """The largest step and time that pushes said."""
        return TableClock(*self._store.clock)

    def advance_clock(self, clock: TableClock) -> None:
        """Go on from ``clock``, if that is later."""
        self._store.advance_clock(*clock)

    def take_leap(self) -> TableClock:
        """The farthest that one push moved each number of the clock, since this was asked last."""
        return TableClock(*self._store.take_leap())

    @property
    def num_evicted(self) -> int:
        """Rows that went because others needed their room, since the table was made here."""
        return self._store.num_evicted

    def read_lives(self, position: int, most: int) -> tuple[Ids, npt.NDArray[Any] | None, int]:
        """The ids [N] of at most ``most`` rows from a position on, their lives [N] (None: the table keeps none), and
        the position to go on at, -1: that was all. Rows lie as they were created, or by id in a dense table.
        """
        ids, lives = np.empty(most, np.int64), np.empty(most, LIFE) if self.spec.keeps_lives else None
        count, position = self._store.read_lives(position, ids, life_bytes(lives))
        return ids[:count], None if lives is None else lives[:count], position

    @property
    def latest_moment(self) -> int:
        """Number of the last moment that is known: of a freeze, of :meth:`note_moment`, or 0, when the table was made;
        -1: all were forgotten."""
        return self._store.latest_moment

    def note_moment(self) -> int:
        """Note the present moment for :meth:`freeze`; return its number."""
        return self._store.note_moment()

    def freeze(self, *, since: int | None = None) -> int:
        """Hold on to all rows as they are now, for :meth:`read_frozen`, while writes go on; return their number.

        With ``since`` only to those written since that moment. :attr:`latest_moment` is the number of this one. Costs
        a bit per row now, and a copy of each row that is written before it was read. Raises ValueError if the table is
        frozen already, or does not know the moment.
        """
        return self._store.freeze(since)

    def read_frozen(
        self, most: int, buckets: npt.NDArray[np.bool_] | None = None, *, out: StoredRows | None = None
    ) -> StoredRows:
        """Up to ``most`` frozen rows that were not read yet; with ``buckets`` [4096] only those of the marked ones.

        N is 0 when that was all. The order is that of creation, or of ids for a dense table. Other buckets than in the
        call before cost a look at every row that was not read yet. ``out`` is memory for them, of ``most`` rows or
        more (:meth:`StoredRows.empty`), without those parts that are not wanted; None: fresh memory.
        """
        found = (StoredRows.empty(self.spec, most) if out is None else out).between(0, most)
        ids, rows, slots, steps, lives = found
        row_bits, slot_bits = ops.as_bits(rows)[0], None if slots is None else ops.as_bits(slots)[0]
        wanted = None if buckets is None else buckets.view(np.uint8)
        num = 0
        while num == 0:  # each call looks at a bounded number of rows, and lets writers in after it
            num = self._store.read_frozen(ids, row_bits, slot_bits, steps, wanted, life_bytes(lives))
        return found.between(0, max(num, 0))

    def frozen_removed(self, most: int = _MOST_REMOVED) -> Iterator[Ids]:
        """The ids of rows that were there at the moment that :meth:`freeze` was told and had been removed when it came,
        in arrays of at most ``most``. One that had a row again may be among them: its row is among the frozen ones.
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
        """End the freeze. If its rows were not kept (``kept=False``) its moment is forgotten."""
        self._store.thaw(kept)

    def restore(
        self,
        ids: Ids,
        rows: npt.NDArray[Any],
        slots: npt.NDArray[Any] | None,
        steps: Ids | None = None,
        lives: npt.NDArray[Any] | None = None,
    ) -> int:
        """Write rows [N, D], slots [N, slot_dim], steps [N] and lives [N] as :meth:`read_frozen` gave them.

        Returns the number of rows created.

        They do not count as written since any moment. 16-bit rows of an export come without steps, which
        count as 0. Where ``max_bytes`` have no room for all of them, those go, or do not come, that eviction would take
        first. Raises as :meth:`assign`.
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
        """The steps that its rows count in; None where untouched rows are frozen."""
        if not self.spec.counts_steps:
            return None
        now, lrs, row_factor, slot_factor = self._store.step_state()
        return TableSteps(now, lrs, (row_factor, slot_factor))

    def adopt_steps(self, steps: TableSteps) -> None:
        """Count on from ``steps``, that :attr:`steps` gave where the rows restored here were frozen.

        Raises InvalidArgument if they are not such.
        """
        try:
            self._store.adopt_steps(steps.now, list(steps.lrs), *steps.origin)
        except ValueError as exc:
            raise InvalidArgument(f"these are no steps of table {self.spec.name!r}: {exc}") from exc

    def _refuse(self, refused: Refusal, values: Ids, label: str = "out") -> NoReturn:
        reason, index = refused.args
        raise self.served.refusal(reason, index, int(values[index]), label) from None


def _require_usable(spec: TableSpec, most_rows: int) -> None:
    """Raise InvalidArgument for a ``max_bytes`` with room for no row, and an expiry that cannot be asked."""
    if most_rows < 1:
        raise InvalidArgument(
            f"max_bytes of table {spec.name!r} is {spec.max_bytes}, and a shard's share of it holds no row of "
            f"{spec.row_bytes + spec.slot_bytes + spec.step_bytes + spec.life_bytes} bytes and its index; raise it"
        )
    if spec.expiry is not None:
        spec.expiry.require_usable()
