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
above the last one of that incarnation is a repeat and changes nothing; a lower incarnation is StaleClient. A higher
incarnation starts anew: what it numbers counts.

**What is atomic.** Each call that changes something is one record in one ``write`` of the store, before it returns: the
gradients of an add and the mark of its source; batches becoming due; a due batch and its number; failures; done. A
process that dies between two calls loses nothing; one that dies within a call has made it or not, and the sender's
repeat of an add counts once either way. The unit of takeover is a batcher: all its keys begin with ``prefix``. With a
store that several gears can open one after the other (Redis), the successor of a dead gear makes
``restored(store, prefix=…)`` and goes on with its batches, its marks and the unfinished due batch under its old number.
A gear that serves several partitions makes a batcher for each, with the partition in the prefix.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels.ops import all_finite
from geartrain.ams.storage.kv.store import KeyValueStore
from geartrain.ams.values.arrays import ids_array, rows_array
from geartrain.ams.values.errors import InvalidArgument, SpecMismatch, StaleClient, StateFailed
from geartrain.ams.values.gear_messages import GearAccount
from geartrain.ams.values.specs import Ids
from geartrain.bridge.gear.batch_checks import check_distinct, check_sender, check_settings, checked_lags
from geartrain.bridge.gear.batch_journal import Arrays, Journal, Values
from geartrain.bridge.gear.batch_state import BatchState, Floats, Mark, Taken

Reduction = Literal["mean", "sum"]
StaleRule = Literal["apply", "scale", "drop"]
_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True, eq=False)
class DueBatch:
    """Gradients for one backward pass of the dense part."""

    number: int
    """1, 2, …: the same batch has the same number after a restart, so it names the push that it leads to."""
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

    Shapes: N ids of an add, K of a due batch, D width. An add of 1,000 ids of D = 64 takes about 0.3 ms, with a store
    also the writing of its bytes. Memory: (4 D + 8 · sources + 112) bytes an id that waits; ``flush_seconds``
    bounds how many do. What was needed once is kept for the next.
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
        store: KeyValueStore | None = None,
        prefix: str = "gradients/",
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
            store: where it is kept, or None: it ends with the process. Stays the caller's to close; a
                :class:`geartrain.ams.storage.kv.store.LockedStore` where batchers share it.
            prefix: of its keys there; ends with "/".
            clock: unix seconds. Set back, a batch waits at most ``flush_seconds`` from then on.

        Raises:
            InvalidArgument: a value outside its range, or the store holds gradients under this prefix
                (``restored`` goes on with them).
        """
        check_settings(dim, gradients_per_id, ids_per_update, reduction, flush_seconds, stale, max_gradient_lag)
        self._gradients_per_id = gradients_per_id
        self._reduction = reduction
        self._flush_seconds = flush_seconds
        self._stale = stale
        self._max_gradient_lag = max_gradient_lag
        self._clock = clock
        self._state = BatchState(dim, gradients_per_id, ids_per_update)
        self._journal = None if store is None else Journal(store, prefix)
        if self._journal is not None and not self._journal.is_empty():
            raise InvalidArgument(
                f"the store holds gradients under {prefix!r}; go on with them: GradientBatcher.restored(store, …), or "
                "give another prefix"
            )
        self._failure: BaseException | None = None
        self._failed_because: Counter[str] = Counter()
        self._earliest = math.inf
        """Nothing that waits is older."""
        self._latest_now = -math.inf
        self._lock = threading.RLock()

    @classmethod
    def restored(
        cls, store: KeyValueStore, dim: int, *, gradients_per_id: int, prefix: str = "gradients/", **settings: Any
    ) -> Self:
        """Go on with what the store holds under the prefix, or begin with nothing. Settings but ``dim`` may change.

        Raises SpecMismatch (another ``dim``), StateDamaged, and what the constructor raises.
        """
        batcher = cls(dim, gradients_per_id=gradients_per_id, **settings)
        batcher._journal = Journal(store, prefix)
        state, events = batcher._journal.read()
        if state is not None:
            batcher._state = BatchState.from_arrays(*state, gradients_per_id, batcher._state.ids_per_update)
        found = batcher._state.dim if state is not None else (events[0][1]["dim"] if events else dim)
        if found != dim:
            raise SpecMismatch(f"the store holds gradients of dim {found} under {prefix!r}; dim is {dim}")
        for arrays, values in events:
            batcher._replay(arrays, values)
        batcher._latest_now = batcher._clock()
        batcher._state.not_after(batcher._latest_now)
        batcher._earliest = -math.inf
        return batcher

    def add(
        self,
        source: str,
        incarnation: int,
        sequence: int,
        ids: Any,
        gradients: Any,
        versions: Any,
        *,
        dense_version: int,
        lr: float | None = None,
    ) -> GearAccount:
        """Collect the gradients of one step of a fast gear; a repeat of (incarnation, sequence) changes nothing.

        A row with NaN or infinity is dropped and counted in ``non_finite``; the others are taken.

        Args:
            source: who sends: the name of the fast gear's stream.
            incarnation: of the source, rising with each takeover of its name.
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
            StaleClient: a newer incarnation of the source has sent.
            StateFailed, StoreUnavailable: it could not be written; the batcher takes no further change: make it anew
                with ``restored``.
        """
        ids = ids_array(ids, None)
        rows = rows_array(gradients, len(ids), self._state.dim, dtype=_FLOAT32)
        lags = checked_lags(versions, len(ids), dense_version)
        check_distinct(ids)
        check_sender(source, incarnation, sequence, lr)
        with self._changing():
            if self._is_repeat(source, Mark(incarnation, sequence)):
                return self._state.account(source)
            now = self._now()
            kept, rows, dropped_stale, non_finite = self._sifted(rows, lags)
            arrays = {"ids": ids, "gradients": rows, "versions": dense_version - lags}
            if kept is not None:
                arrays = {name: array[kept] for name, array in arrays.items()}
            values = {
                "call": "add",
                "source": source,
                "mark": [incarnation, sequence],
                "lr": lr,
                "now": now,
                "dropped_stale": dropped_stale,
                "non_finite": non_finite,
            }
            self._make(arrays, values)
            self._earliest = min(self._earliest, now)
            return self._state.account(source)

    def due(self, limit: int | None = None) -> DueBatch | None:
        """Take the batches that are due, at most ``limit`` ids; None: there are none.

        Until ``done`` the same batch is returned again, less what failed: one batch is out at a time, and what comes
        meanwhile waits. An id whose sum is beyond float32 is dropped and counted in ``non_finite``.

        Raises InvalidArgument, and errors of the store as ``add``.
        """
        if limit is not None and limit < 1:
            raise InvalidArgument(f"limit is {limit}; it must be at least 1, or None")
        with self._changing():
            if self._state.taken is None:
                self._close_overdue()
                while len(ids := self._state.due_ids(limit)):
                    ids = self._without_overflown(ids)
                    if len(ids):
                        self._make({"ids": ids}, {"call": "take"})
                        break
            return None if self._state.taken is None else self._due_batch(self._state.taken)

    def flush(self) -> None:
        """Make every batch due, with its true count. Errors of the store as ``add``."""
        with self._changing():
            ids = self._state.waiting_ids()
            if len(ids):
                self._make({"ids": ids}, {"call": "close"})

    def done(self, number: int) -> None:
        """The batch of this number was applied. A repeat changes nothing.

        Raises InvalidArgument (no such batch was taken), and errors of the store as ``add``.
        """
        with self._changing():
            if self._is_out(number):
                self._make({}, {"call": "settle"})

    def failed(self, number: int, ids: Mapping[int, str]) -> None:
        """No gradient can be made for these ids (and why): they leave the batch of this number, counted.

        The rest stays; if there is none, the batch is settled. To be called before ``done``; ids that it does not have
        (any more) change nothing.

        Raises InvalidArgument (no such batch was taken), and errors of the store as ``add``.
        """
        with self._changing():
            if not self._is_out(number):
                return
            assert self._state.taken is not None
            array = np.fromiter(ids, np.int64, len(ids))
            gone = np.intersect1d(array, self._state.taken.ids)
            if len(gone):
                self._make({"ids": gone}, {"call": "fail"})
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
                "sources": {name: [mark.incarnation, mark.sequence] for name, mark in self._state.marks.items()},
                "failures": dict(self._failed_because.most_common(20)),
            }

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock:
            if self._failure is not None:
                raise StateFailed(
                    f"an earlier change could not be written: {self._failure}; make the batcher anew with "
                    "GradientBatcher.restored"
                ) from self._failure
            yield

    def _make(self, arrays: Arrays, values: Values) -> None:
        """Write a change, then make it."""
        try:
            if self._journal is not None:
                self._journal.write(arrays, values | {"dim": self._state.dim})
            self._replay(arrays, values)
            if self._journal is not None and self._journal.is_long:
                self._journal.compact(*self._state.arrays())
        except BaseException as exc:  # it may be there or not: only reading it again can tell
            self._failure = exc
            raise

    def _replay(self, arrays: Arrays, values: Values) -> None:
        state, call = self._state, values["call"]
        if call == "add":
            state.add(
                values["source"],
                Mark(*values["mark"]),
                arrays["ids"],
                arrays["gradients"],
                arrays["versions"],
                lr=math.nan if values["lr"] is None else values["lr"],
                now=values["now"],
                dropped_stale=values["dropped_stale"],
                non_finite=values["non_finite"],
            )
        elif call == "settle":
            state.settle()
        else:
            {"close": state.close, "take": state.take, "discard": state.discard, "fail": state.fail}[call](
                arrays["ids"]
            )

    def _is_repeat(self, source: str, mark: Mark) -> bool:
        last = self._state.marks.get(source)
        if last is None or mark.incarnation > last.incarnation:
            return False
        if mark.incarnation < last.incarnation:
            raise StaleClient(
                f"incarnation {mark.incarnation} of {source!r} was superseded by {last.incarnation}: another process "
                "has taken over its name"
            )
        return mark.sequence <= last.sequence

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
        ids = self._state.waiting_ids(until)
        if len(ids):
            self._make({"ids": ids}, {"call": "close"})
        self._earliest = self._state.earliest()

    def _without_overflown(self, ids: Ids) -> Ids:
        finite = np.isfinite(self._reduced(*self._state.sums(ids))).all(1)
        if not finite.all():
            self._make({"ids": ids[~finite]}, {"call": "discard"})
        return ids[finite]

    def _reduced(self, sums: Floats, counts: npt.NDArray[np.int64]) -> Floats:
        return sums if self._reduction == "sum" else sums / counts.astype(np.float32)[:, None]

    def _due_batch(self, taken: Taken) -> DueBatch:
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
