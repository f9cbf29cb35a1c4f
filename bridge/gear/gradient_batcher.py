"""Gradients of dense features, collected by id until a backward pass of the dense part pays.

One *gradient* is one (fast gear, step, id): occurrences of an id within a step are summed before they travel. A batch
is what waits for one id. It is full when it has ``gradients_per_id`` (M) of them. Full batches are due when together
they have those of ``ids_per_update`` ids (times M); any batch is when its first has waited for ``flush_seconds``, or
after ``flush``. What comes until it is taken joins it.

**Company** (``ids_per_update`` > 1). One dense update is made of what is due together. Few ids in each mean many noisy
updates between two looks at a feature, all against the same old features, and a learning rate that serves ordinary
batches overshoots; they also use a device badly. Ids up to the size of an ordinary batch cost no more arithmetic.

**Reduction** (seed 002, section 3.6): ``"mean"`` divides the sum by the number of gradients in the batch. Ordinary
back-propagation adds the gradients of an id, so with plain SGD a mean of M is the sum at a learning rate divided by M;
Adam, which divides by the gradient's own magnitude, hardly notices. ``"sum"`` leaves the sum.

**Stale gradients.** lag = dense_version − version of the feature (below 0: 0). ``stale="apply"`` takes them as they
are, ``"scale"`` multiplies each by 1 / (1 + lag) and still counts it as one, ``"drop"`` drops and counts what lags by
more than ``max_gradient_lag``.

**Exactly once.** A source sends its adds one at a time, numbered upwards (gaps are free). An add whose number is not
above the last one that counted is a repeat and changes nothing.

What waits is in memory and ends with the process; ``docs/decisions/0030`` says why, and who counts it then.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels.ops import all_finite, merge_duplicates
from geartrain.ams.values.arrays import ids_array, rows_array
from geartrain.ams.values.errors import InvalidArgument, InvalidIds, InvalidRows, StateFailed
from geartrain.ams.values.gear_messages import GearAccount
from geartrain.ams.values.specs import Ids
from geartrain.bridge.gear.batch_state import BatchState, Floats, TakenBatch

Reduction = Literal["mean", "sum"]
StaleRule = Literal["apply", "scale", "drop"]
_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True, eq=False)
class DueBatch:
    """Gradients for one backward pass of the dense part."""

    number: int
    """1, 2, …"""
    ids: Ids
    """[K] distinct, the first that became due first."""
    gradients: Floats
    """[K, D] mean or sum, finite."""
    counts: npt.NDArray[np.int64]
    """[K] how many gradients each stands for."""
    versions: npt.NDArray[np.int64]
    """[K] the lowest dense version of a feature that one of them is against."""
    lr: float | None
    """Learning rate of the newest gradient that came with one; None: none did."""


class GradientBatcher:
    """See the head of this file. Thread-safe.

    Shapes: N ids of an add, K of a due batch, D width. An add of 1,000 ids of D = 64 takes about 0.3 ms. Memory:
    (4 D + 8 · sources + 112) bytes an id that waits; ``flush_seconds`` bounds how many do. What was needed once is kept
    for the next.
    """

    def __init__(
        self,
        dim: int,
        *,
        gradients_per_id: int,
        ids_per_update: int = 1,
        reduction: Reduction = "mean",
        flush_seconds: float | None = None,
        stale: StaleRule = "apply",
        max_gradient_lag: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Begin with nothing.

        Args:
            dim: D.
            gradients_per_id: M; with 1 every batch is full at once.
            ids_per_update: ids whose full batches make a dense update worth while; 1: none waits for another's.
            reduction: see the head of this file.
            flush_seconds: longest wait for a batch to fill; None: no bound.
            stale: see the head of this file.
            max_gradient_lag: for ``stale="drop"``: the largest lag that is taken.
            clock: unix seconds. Set back, a batch waits at most ``flush_seconds`` from then on.

        Raises:
            InvalidArgument: a value outside its range.
        """
        _check_settings(dim, gradients_per_id, ids_per_update, reduction, flush_seconds, stale, max_gradient_lag)
        self._gradients_per_id = gradients_per_id
        self._reduction = reduction
        self._flush_seconds = flush_seconds
        self._stale = stale
        self._max_gradient_lag = max_gradient_lag
        self._clock = clock
        self._state = BatchState(dim, gradients_per_id, ids_per_update)
        self.torn: BaseException | None = None
        """What tore a change out half-way, so that nothing can be counted any more: Ctrl-C, or memory that ran out."""
        self._failed_because: Counter[str] = Counter()
        self._earliest = math.inf
        """Nothing that waits is older."""
        self._latest_now = -math.inf
        # Collected garbage may ask for the account in the middle of a change, on the same thread.
        self._lock = threading.RLock()

    def add(
        self,
        source: str,
        sequence: int,
        ids: Any,
        gradients: Any,
        versions: Any,
        *,
        dense_version: int,
        lr: float | None = None,
    ) -> GearAccount:
        """Collect the gradients of one step of a fast gear; a repeat of a sequence changes nothing.

        A row with NaN or infinity is dropped and counted in ``non_finite``; the others are taken.

        Args:
            source: who sends: the name of the fast gear's stream.
            sequence: number of this add, >= 0 and rising.
            ids: [N] distinct, >= 0.
            gradients: float32 [N, D].
            versions: int64 [N]: the dense versions of the features that they are against.
            dense_version: of the dense table now.
            lr: the learning rate that travels with them; None: the dense table's own.

        Returns:
            What became of all gradients of this source so far.

        Raises:
            InvalidIds: an id is no integer >= 0, or occurs twice.
            InvalidRows: gradients or versions of another shape or dtype.
            InvalidArgument: another value is outside its range.
            StateFailed: an earlier change was torn out half-way.
        """
        ids = ids_array(ids, None)
        rows = rows_array(gradients, len(ids), self._state.dim, dtype=_FLOAT32)
        lags = _checked_lags(versions, len(ids), dense_version)
        _check_distinct(ids)
        _check_sender(source, sequence, lr)
        with self._changing():
            state = self._state
            if not self._has_counted(source, sequence):
                now = self._now()
                kept, rows, dropped_stale, non_finite = self._sifted(rows, lags)
                every = slice(None) if kept is None else kept
                state.add(
                    source,
                    sequence,
                    ids[every],
                    rows[every],
                    (dense_version - lags)[every],
                    lr=math.nan if lr is None else lr,
                    now=now,
                    dropped_stale=dropped_stale,
                    non_finite=non_finite,
                )
                self._earliest = min(self._earliest, now)
            return state.account(source)

    def has_counted(self, source: str, sequence: int) -> bool:
        """Whether an add of this source would be a repeat."""
        with self._lock:
            return self._has_counted(source, sequence)

    def due(self, limit: int | None = None) -> DueBatch | None:
        """Take the batches that are due, at most ``limit`` ids; None: there are none.

        Until ``done`` the same batch is returned again, less what failed: one batch is out at a time, and what comes
        meanwhile waits. An id whose sum is beyond float32 is dropped and counted in ``non_finite``.

        Raises InvalidArgument.
        """
        if limit is not None and limit < 1:
            raise InvalidArgument(f"limit is {limit}; it must be at least 1, or None")
        with self._changing():
            if self._state.taken is None:
                self._close_overdue()
                while len(ids := self._state.due_ids(limit)):
                    ids = self._without_overflown(ids)
                    if len(ids):
                        self._state.take(ids)
                        break
            return None if self._state.taken is None else self._due_batch(self._state.taken)

    def flush(self) -> None:
        """Make every batch due, with its true count."""
        with self._changing():
            self._state.close(self._state.waiting_ids())

    def done(self, number: int) -> None:
        """The batch of this number was applied. A repeat changes nothing.

        Raises InvalidArgument: no such batch was taken.
        """
        with self._changing():
            if self._is_out(number):
                self._state.settle()

    def failed(self, number: int, ids: Mapping[int, str]) -> None:
        """No gradient can be made for these ids (and why): they leave the batch of this number, counted.

        The rest stays; if there is none, the batch is settled. To be called before ``done``; ids that it does not have
        (any more) change nothing.

        Raises InvalidArgument: no such batch was taken.
        """
        with self._changing():
            if not self._is_out(number):
                return
            assert self._state.taken is not None
            array = np.fromiter(ids, np.int64, len(ids))
            gone = np.intersect1d(array, self._state.taken.ids)
            if len(gone):
                self._state.fail(gone)
                self._failed_because.update(ids[one] for one in gone.tolist())

    def account(self, source: str | None = None) -> GearAccount:
        """What became of the gradients of one source, or of all: ``received`` is the sum of the others."""
        with self._lock:
            return self._state.account(source)

    def report(self) -> dict[str, Any]:
        """The account, how many ids wait or are due, the batch that is out, sources, and why ids failed."""
        with self._lock:
            taken = self._state.taken
            return {
                **vars(self._state.account(None)),
                "ids": len(self._state),
                "ids_due": self._state.num_due,
                "number_out": None if taken is None else taken.number,
                "sources": dict(self._state.last_sequences),
                "failures": dict(self._failed_because.most_common(20)),
            }

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock:
            if self.torn is not None:
                raise StateFailed(
                    f"a change was torn out half-way by {type(self.torn).__name__}, so that nobody knows what was "
                    "counted; make the slow gear anew"
                ) from self.torn
            try:
                yield
            except InvalidArgument:
                raise
            except BaseException as exc:
                self.torn = exc
                raise

    def _has_counted(self, source: str, sequence: int) -> bool:
        return sequence <= self._state.last_sequences.get(source, -1)

    def _sifted(
        self, rows: Floats, lags: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.bool_] | None, Floats, int, int]:
        """Return which rows are kept (None: all), the rows, scaled, and how many are stale and how many not finite."""
        kept: npt.NDArray[np.bool_] | None = None
        dropped_stale = non_finite = 0
        if not all_finite(rows):
            kept = np.asarray(np.isfinite(rows).all(1))
            non_finite = len(rows) - int(np.count_nonzero(kept))
        if self._max_gradient_lag is not None:
            fresh = lags <= self._max_gradient_lag
            if not fresh.all():
                kept = fresh if kept is None else fresh & kept
                dropped_stale = len(rows) - int(np.count_nonzero(kept)) - non_finite
        elif self._stale == "scale" and lags.any():
            rows = rows * (1.0 / (1.0 + lags)).astype(np.float32)[:, None]
        return kept, rows, dropped_stale, non_finite

    def _now(self) -> float:
        now = self._clock()
        if now < self._latest_now:
            self._state.not_after(now)
            self._earliest = -math.inf
        self._latest_now = now
        return now

    def _close_overdue(self) -> None:
        if self._flush_seconds is None:
            return
        until = self._now() - self._flush_seconds
        if until < self._earliest:
            return
        self._state.close(self._state.waiting_ids(until))
        self._earliest = self._state.earliest()

    def _without_overflown(self, ids: Ids) -> Ids:
        finite = np.isfinite(self._reduced(*self._state.sums(ids))).all(1)
        if not finite.all():
            self._state.discard(ids[~finite])
        return ids[finite]

    def _reduced(self, sums: Floats, counts: npt.NDArray[np.int64]) -> Floats:
        return sums if self._reduction == "sum" else sums / counts.astype(np.float32)[:, None]

    def _due_batch(self, taken: TakenBatch) -> DueBatch:
        counts = taken.counts.sum(1)
        lr = None if math.isnan(taken.lr) else taken.lr
        gradients = self._reduced(taken.sums, counts)
        return DueBatch(taken.number, taken.ids, gradients, counts, taken.versions, lr)

    def _is_out(self, number: int) -> bool:
        """Whether this batch is out now; False: it was settled before."""
        if not 1 <= number <= self._state.number:
            raise InvalidArgument(
                f"batch {number} was never taken; the last one is {self._state.number}: give the number of a DueBatch"
            )
        return self._state.taken is not None and self._state.taken.number == number


def _checked_lags(versions: Any, num_ids: int, dense_version: int) -> npt.NDArray[np.int64]:
    """Return how many dense updates each feature lags [N], not below 0. Raises InvalidRows."""
    array = np.asarray(versions)
    if array.shape != (num_ids,) or (array.dtype.kind not in "iu" and num_ids):
        raise InvalidRows(
            f"versions are {array.dtype} of shape {array.shape}; {num_ids} ids need integers ({num_ids},)"
        )
    return np.maximum(dense_version - array.astype(np.int64), 0)


def _check_distinct(ids: Ids) -> None:
    """Raise InvalidIds, naming the first id that occurs twice."""
    distinct, inverse, _ = merge_duplicates(ids)
    if len(distinct) < len(ids):
        first = int(np.flatnonzero(np.bincount(inverse) > 1)[0])
        raise InvalidIds(
            f"id {distinct[first]} occurs {np.count_nonzero(inverse == first)} times; ids of an add must be distinct: "
            "sum the gradients of an id within a step first"
        )


def _check_sender(source: str, sequence: int, lr: float | None) -> None:
    """Raise InvalidArgument if one of these is outside its range."""
    if not source:
        raise InvalidArgument("source is ''; it must name the fast gear, so that a retried gradient counts once")
    if sequence < 0:
        raise InvalidArgument(f"sequence is {sequence}; it must be >= 0")
    if lr is not None and not (math.isfinite(lr) and lr >= 0):
        raise InvalidArgument(f"lr is {lr!r}; it must be finite and >= 0, or None for the dense table's own")


def _check_settings(
    dim: int,
    gradients_per_id: int,
    ids_per_update: int,
    reduction: str,
    flush_seconds: float | None,
    stale: str,
    max_gradient_lag: int | None,
) -> None:
    """Raise InvalidArgument if one of these is outside its range."""
    if dim < 1:
        raise InvalidArgument(f"dim is {dim}; it must be at least 1")
    if gradients_per_id < 1:
        raise InvalidArgument(f"gradients_per_id is {gradients_per_id}; it must be at least 1")
    if ids_per_update < 1:
        raise InvalidArgument(f"ids_per_update is {ids_per_update}; it must be at least 1")
    if reduction not in ("mean", "sum"):
        raise InvalidArgument(f"reduction is {reduction!r}; it must be 'mean' or 'sum'")
    if flush_seconds is not None and not flush_seconds >= 0:
        raise InvalidArgument(f"flush_seconds is {flush_seconds!r}; it must be >= 0, or None for no bound")
    if stale not in ("apply", "scale", "drop"):
        raise InvalidArgument(f"stale is {stale!r}; it must be 'apply', 'scale' or 'drop'")
    if (stale == "drop") != (max_gradient_lag is not None):
        raise InvalidArgument(
            f"max_gradient_lag is {max_gradient_lag} with stale={stale!r}; stale='drop' needs it, the others take None"
        )
    if max_gradient_lag is not None and max_gradient_lag < 0:
        raise InvalidArgument(f"max_gradient_lag is {max_gradient_lag}; it must be >= 0")
