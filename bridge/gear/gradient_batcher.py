"""Gradients of dense features, collected by id until enough wait for a backward pass of the dense part.

A *gradient* is one (fast gear, step, id): occurrences of an id within a step are summed before they are sent. A batch
holds the waiting gradients of one id. It is full when it has ``gradients_per_id`` (M) of them. Full batches are due
when together they have the gradients of ``ids_per_update`` ids (times M); any batch is due when its first gradient has
waited for ``flush_seconds``, or after ``flush``. Gradients that come before the batch is taken join it.

**Ids per update** (``ids_per_update`` > 1). Due batches make one dense update together. With few ids in each there are
many noisy updates while a feature is cached, all from the same old features, and a learning rate for ordinary batches
overshoots; a device is also badly used. Up to the size of an ordinary batch, more ids cost no more arithmetic.

**Reduction** (seed 002, section 3.6): ``"mean"`` divides the sum by the number of gradients in the batch. Ordinary
back-propagation adds the gradients of an id, so with plain SGD a mean of M is the sum at a learning rate divided by M;
Adam, which divides by the gradient's own magnitude, hardly changes. ``"sum"`` leaves the sum.

**Stale gradients.** lag = dense_version − version of the feature (at least 0). ``stale="apply"`` uses them as they are,
``"scale"`` multiplies each by 1 / (1 + lag) and still counts it as one, ``"drop"`` drops and counts gradients with a
lag above ``max_gradient_lag``.

**Exactly once.** A source sends its adds one at a time, with ascending numbers (gaps are allowed). An add whose number
is not above the last counted one is a duplicate and changes nothing.

Waiting gradients are in memory; :mod:`~geartrain.bridge.gear.gradient_journal` keeps them for the next process.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels.ops import all_finite
from geartrain.ams.values.errors import InvalidArgument, StateFailed
from geartrain.ams.values.gear_messages import Delivery, GearAccount
from geartrain.ams.values.specs import Ids
from geartrain.bridge.gear.batch_state import BatchState, DueBatch, Floats
from geartrain.bridge.gear.config import SlowGearConfig


class GradientBatcher:
    """Batches gradients by id; the rules are at the top of this file. Thread-safe.

    Shapes: N ids of an add, K of a due batch, D width. An add of 1,000 ids of D = 64 takes about 0.3 ms. Memory: (4 D +
    8 · sources + 112) bytes a waiting id; ``flush_seconds`` limits their number. Memory is kept for reuse.
    """

    def __init__(self, dim: int, gradients_per_id: int, config: SlowGearConfig) -> None:
        """Start empty, with M = ``gradients_per_id``: with 1 every batch is full at once. Raises InvalidArgument.

        After the clock was set back, a batch waits at most ``flush_seconds`` from then on.
        """
        for name, value in (("dim", dim), ("gradients_per_id", gradients_per_id)):
            if value < 1:
                raise InvalidArgument(f"{name} is {value}; it must be at least 1")
        self._config = config
        self._state = BatchState(dim, gradients_per_id, config.ids_per_update)
        self.torn: BaseException | None = None
        """Exception that interrupted a change, so that counts are unreliable: Ctrl-C, or no memory; None: none has."""
        self._earliest = math.inf
        """Lower bound of the times of waiting gradients."""
        self._latest_now = -math.inf
        # Reentrant: garbage collection may read the account in the middle of a change, on the same thread.
        self._lock = threading.RLock()

    def add(self, delivery: Delivery, dense_version: int) -> GearAccount:
        """Collect the gradients of one step of a fast gear; a repeated sequence number changes nothing.

        A row with NaN or infinity is dropped and counted in ``non_finite``; the others are added. ``dense_version`` is
        the dense table's now. Returns the account of this source. Raises StateFailed if an earlier change was
        interrupted.
        """
        with self._changing():
            state = self._state
            if not self._has_counted(delivery):
                now = self._now()
                lags = np.maximum(dense_version - delivery.versions, 0)
                kept, rows, dropped_stale, non_finite = self._sifted(delivery.gradients_KD, lags)
                every = slice(None) if kept is None else kept
                state.add(
                    delivery.source,
                    delivery.sequence,
                    delivery.ids[every],
                    rows[every],
                    (dense_version - lags)[every],
                    lr=math.nan if delivery.lr is None else delivery.lr,
                    now=now,
                    dropped_stale=dropped_stale,
                    non_finite=non_finite,
                )
                self._earliest = min(self._earliest, now)
            return state.account(delivery.source)

    def has_counted(self, delivery: Delivery) -> bool:
        """Return whether adding this delivery would be a repeat."""
        with self._lock:
            return self._has_counted(delivery)

    def due(self) -> DueBatch | None:
        """Take the due batch; None: nothing is due.

        Until ``complete`` the same batch is returned again: only one is out at a time, and new gradients wait. An id
        whose sum is beyond float32 is dropped and counted in ``non_finite``.
        """
        with self._changing():
            if self._state.taken is None:
                self._close_overdue()
                self._state.pop(mean=self._config.reduction == "mean")
            return self._state.taken

    def flush(self) -> None:
        """Make every batch due, with its true count."""
        with self._changing():
            self._state.close(self._state.waiting_ids())

    @property
    def is_all_taken(self) -> bool:
        """Whether no gradient waits, except in the batch that is out."""
        with self._lock:
            return not len(self._state)

    def last_sequences(self) -> dict[str, int]:
        """Return the number of the last add of each source."""
        with self._lock:
            return dict(self._state.last_sequences)

    def restore(self, accounts: Mapping[str, GearAccount], sequences: Mapping[str, int]) -> None:
        """Start with earlier outcomes of each source's gradients, and its last number."""
        with self._changing():
            self._state.restore(accounts, sequences)

    def pop_again(self, ids: Ids) -> DueBatch | None:
        """Take the batches of these ids, as :meth:`due` did in an earlier process after the same adds.

        Others may be due here, as M was larger there; they stay.
        """
        with self._changing():
            self._state.close(ids)
            self._state.pop(ids, mean=self._config.reduction == "mean")
            return self._state.taken

    def complete(self, failed: Collection[int] = ()) -> None:
        """Record that the batch of ``due`` was applied, but for ``failed`` ids, which have no gradient."""
        with self._changing():
            self._state.complete(np.fromiter(failed, np.int64, len(failed)))

    def account(self, source: str | None = None) -> GearAccount:
        """Return the outcomes of one source's gradients, or of all; ``received`` is the sum of the others."""
        with self._lock:
            return self._state.account(source)

    def accounts(self) -> dict[str, GearAccount]:
        """Return the outcomes of each source's gradients."""
        with self._lock:
            return {source: self._state.account(source) for source in self._state.sources}

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock:
            if self.torn is not None:
                raise StateFailed(
                    f"a change was interrupted by {type(self.torn).__name__}, so the counts of gradients are unknown; "
                    "make the slow gear anew"
                ) from self.torn
            try:
                yield
            except BaseException as exc:
                self.torn = exc
                raise

    def _has_counted(self, delivery: Delivery) -> bool:
        return delivery.sequence <= self._state.last_sequences.get(delivery.source, -1)

    def _sifted(
        self, rows: Floats, lags: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.bool_] | None, Floats, int, int]:
        """Return which rows are kept (None: all), the rows, scaled, and the numbers of stale and non-finite ones."""
        kept: npt.NDArray[np.bool_] | None = None
        dropped_stale = non_finite = 0
        if not all_finite(rows):
            kept = np.asarray(np.isfinite(rows).all(1))
            non_finite = len(rows) - int(np.count_nonzero(kept))
        if self._config.max_gradient_lag is not None:
            fresh = lags <= self._config.max_gradient_lag
            if not fresh.all():
                kept = fresh if kept is None else fresh & kept
                dropped_stale = len(rows) - int(np.count_nonzero(kept)) - non_finite
        elif self._config.stale == "scale" and lags.any():
            rows = rows * (1.0 / (1.0 + lags)).astype(np.float32)[:, None]
        return kept, rows, dropped_stale, non_finite

    def _now(self) -> float:
        now = self._config.clock()
        if now < self._latest_now:
            self._state.not_after(now)
            self._earliest = -math.inf
        self._latest_now = now
        return now

    def _close_overdue(self) -> None:
        if self._config.flush_seconds is None:
            return
        until = self._now() - self._config.flush_seconds
        if until < self._earliest:
            return
        self._state.close(self._state.waiting_ids(until))
        self._earliest = self._state.earliest()
