"""State of a gradient batcher: gradients by id and source, and their outcomes. It reads no clock and does no I/O.

Shapes: N ids of one call, K ids of a batch, S sources, D width, C positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels.position_lru import PositionLru, Positions
from geartrain.ams.values.gear_messages import GearAccount
from geartrain.ams.values.specs import Ids

_FIRST_CAPACITY = 1024
_SCANNED = 256
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]


OUTCOMES = tuple(outcome.name for outcome in fields(GearAccount))


@dataclass
class DueBatch:
    """Gradients for one backward pass of the dense part."""

    ids: Ids
    """[K] distinct, in the order in which they became due."""
    gradients: Floats
    """[K, D] mean or sum, finite."""
    counts: npt.NDArray[np.int64]
    """[K, S] number of gradients of each source for each id."""
    versions: npt.NDArray[np.int64]
    """[K] lowest dense version of a feature among the gradients of each id."""
    lr: float | None
    """Learning rate of the newest gradient that had one; None: none had one."""


class BatchState:
    """Gradients by id, waiting or due, and the counts of their outcomes. Not thread-safe.

    Memory: (4 D + 8 S + 113) bytes a position.
    """

    def __init__(self, dim: int, gradients_per_id: int, ids_per_update: int = 1) -> None:
        self.dim = dim
        self.gradients_per_id = gradients_per_id
        self.ids_per_update = ids_per_update
        self.taken: DueBatch | None = None
        """Batch that was taken for a backward pass; None: none is out."""
        self.last_sequences: dict[str, int] = {}
        """Number of the last counted add of each source."""
        self.sources: dict[str, int] = {}
        """Column of each source."""
        self.outcomes: dict[str, npt.NDArray[np.int64]] = {name: np.zeros(0, np.int64) for name in OUTCOMES}
        """Counts by outcome, each [S]."""
        self.adds = 0
        self._latest = -np.inf
        """Time of the last add. First times never fall in the order of arrival: see ``not_after``."""
        self._index = PositionLru(_FIRST_CAPACITY)
        self._ids = np.zeros(_FIRST_CAPACITY, np.int64)
        self._sums = np.zeros((_FIRST_CAPACITY, dim), np.float32)
        self._counts = np.zeros((_FIRST_CAPACITY, 0), np.int64)
        self._versions = np.zeros(_FIRST_CAPACITY, np.int64)
        self._lrs = np.zeros(_FIRST_CAPACITY)
        self._last_add = np.zeros(_FIRST_CAPACITY, np.int64)
        self._first_times = np.zeros(_FIRST_CAPACITY)
        self._is_due = np.zeros(_FIRST_CAPACITY, np.bool_)
        self._is_full = np.zeros(_FIRST_CAPACITY, np.bool_)
        """Whether a position has M gradients but is not due, as too few ids are full."""
        self._full_gradients = 0
        """Number of gradients at these positions."""
        self._due: list[Positions] = []
        """Positions in the order in which they became due."""

    def __len__(self) -> int:
        """Return the number of ids with gradients that were not taken."""
        return len(self._index)

    def add(
        self,
        source: str,
        sequence: int,
        ids: Ids,
        gradients: Floats,
        versions: npt.NDArray[np.int64],
        *,
        lr: float,
        now: float,
        dropped_stale: int,
        non_finite: int,
    ) -> None:
        """Add gradients [N, D] of distinct ids [N]; gradients that were dropped before are counted, too."""
        if now < self._latest:
            self.not_after(now)
        self._latest = now
        column = self._column(source)
        self.last_sequences[source] = sequence
        self.adds += 1
        for name, count in (
            ("received", len(ids) + dropped_stale + non_finite),
            ("dropped_stale", dropped_stale),
            ("non_finite", non_finite),
        ):
            self.outcomes[name][column] += count
        if not len(ids):
            return
        positions = self._positions_of(ids, now)
        with np.errstate(over="ignore", invalid="ignore"):  # overflow of float32 is found when the batch is taken
            self._sums[positions] += gradients
        self._counts[positions, column] += 1
        self._versions[positions] = np.minimum(self._versions[positions], versions)
        if not np.isnan(lr):
            self._lrs[positions], self._last_add[positions] = lr, self.adds
        already = int(np.count_nonzero(self._is_due[positions]))
        self.outcomes["due"][column] += already
        self.outcomes["waiting"][column] += len(ids) - already
        self._gather(positions[~self._is_due[positions]])

    def close(self, ids: Ids) -> None:
        """Make the gradients of these ids due, full or not. Ids without any are ignored."""
        positions = self._index.find(ids, touch=False)
        positions = positions[positions >= 0]
        self._mark_due(positions[~self._is_due[positions]])

    def waiting_ids(self, until: float = np.inf) -> Ids:
        """Return ids that are not due, those that waited longest first; ``until``: only ids first seen by then."""
        positions = self._arrived(until)
        return self._ids[positions[~self._is_due[positions] & (self._first_times[positions] <= until)]]

    def earliest(self) -> float:
        """Return the time of the first gradient that is not due; infinity if there is none."""
        _, positions = self._index.oldest(_SCANNED)
        waiting = positions[~self._is_due[positions]]
        if len(waiting):
            return float(self._first_times[waiting[0]])
        return np.inf if len(positions) == len(self._index) else float(self._first_times[positions[-1]])

    def not_after(self, now: float) -> None:
        """Cap all times at ``now``: the clock was set back."""
        np.minimum(self._first_times, now, out=self._first_times)

    def pop(self, only: Ids | None = None, *, mean: bool) -> None:
        """Take the due gradients, or ``only`` those of some ids, in the order in which they became due.

        No batch may be out. An id whose sum is beyond float32 is dropped as not finite, even if it is not in ``only``.
        """
        assert self.taken is None
        due = np.concatenate([np.empty(0, np.int64), *self._due])
        self._due = []
        if only is not None:
            is_taken = np.isin(self._ids[due], only) | ~np.isfinite(self._sums[due]).all(1)
            self._due, due = [due[~is_taken]], due[is_taken]
        ids = self._ids[due]
        if not len(ids):
            return
        positions = self._index.remove(ids)
        self._is_due[positions] = False
        counts, gradients = self._counts[positions], self._sums[positions]
        if mean:
            gradients /= counts.sum(1).astype(np.float32)[:, None]
        finite = np.isfinite(gradients).all(1)
        if not finite.all():
            self._move("due", "non_finite", counts[~finite])
            ids, positions, counts, gradients = ids[finite], positions[finite], counts[finite], gradients[finite]
        if len(ids):
            newest = positions[np.argmax(self._last_add[positions])]
            lr = float(self._lrs[newest]) if self._last_add[newest] else None
            self.taken = DueBatch(ids, gradients, counts, self._versions[positions], lr)

    def complete(self, failed: Ids) -> None:
        """Record that the batch that is out was applied, but for ``failed`` ids, whose gradients are dropped."""
        assert self.taken is not None
        gone = np.isin(self.taken.ids, failed)
        self._move("due", "dropped_failed", self.taken.counts[gone])
        self._move("due", "applied", self.taken.counts[~gone])
        self.taken = None

    def restore(self, accounts: Mapping[str, GearAccount], sequences: Mapping[str, int]) -> None:
        """Start with earlier counts and numbers of sources; there must be none yet."""
        for source, account in accounts.items():
            column = self._column(source)
            for name in OUTCOMES:
                self.outcomes[name][column] = getattr(account, name)
        self.last_sequences = dict(sequences)

    def account(self, source: str | None) -> GearAccount:
        """Return the counts of one source, or of all together."""
        if source is None:
            return GearAccount(**{name: int(counts.sum()) for name, counts in self.outcomes.items()})
        column = self.sources.get(source)
        if column is None:
            return GearAccount()
        return GearAccount(**{name: int(counts[column]) for name, counts in self.outcomes.items()})

    def _arrived(self, until: float) -> Positions:
        """Return the positions of all ids first seen by ``until``, and perhaps of some later ones. O(their number)."""
        count = _SCANNED
        while True:
            _, positions = self._index.oldest(count)
            if len(positions) < count or self._first_times[positions[-1]] > until:
                return positions
            count *= 4

    def _column(self, source: str) -> int:
        column = self.sources.setdefault(source, len(self.sources))
        if column == self._counts.shape[1]:
            self._counts = np.pad(self._counts, ((0, 0), (0, 1)))
            self.outcomes = {name: np.append(counts, 0) for name, counts in self.outcomes.items()}
            if self.taken is not None:
                self.taken.counts = np.pad(self.taken.counts, ((0, 0), (0, 1)))
        return column

    def _positions_of(self, ids: Ids, now: float) -> Positions:
        """Return the positions of distinct ids, clearing new ones. The index keeps the order of arrival."""
        positions = self._index.find(ids, touch=False)
        new = positions < 0
        if new.any():
            self._reserve(int(np.count_nonzero(new)))
            fresh, _ = self._index.place(ids[new])
            self._ids[fresh] = ids[new]
            self._sums[fresh], self._counts[fresh], self._last_add[fresh] = 0, 0, 0
            self._versions[fresh] = np.iinfo(np.int64).max
            self._lrs[fresh], self._first_times[fresh] = 0, now
            self._is_due[fresh], self._is_full[fresh] = False, False
            positions[new] = fresh
        return positions

    def _reserve(self, count: int) -> None:
        have = self._index.capacity
        if len(self._index) + count <= have:
            return
        self._index.grow(max(2 * have, len(self._index) + count))
        more = self._index.capacity - have
        for name in ("ids", "sums", "counts", "versions", "lrs", "last_add", "first_times", "is_due", "is_full"):
            slab = getattr(self, f"_{name}")
            setattr(self, f"_{name}", np.concatenate([slab, np.zeros((more, *slab.shape[1:]), slab.dtype)]))

    def _gather(self, positions: Positions) -> None:
        """Let full positions, which are not due and have one gradient more, wait until enough ids are full."""
        counts = self._counts[positions].sum(1)
        full = counts >= self.gradients_per_id
        if not full.any():
            return
        positions, counts = positions[full], counts[full]
        self._full_gradients += int(np.where(self._is_full[positions], 1, counts).sum())
        self._is_full[positions] = False
        if self._full_gradients >= self.ids_per_update * self.gradients_per_id:
            company = np.flatnonzero(self._is_full) if self._full_gradients > counts.sum() else positions[:0]
            self._is_full[positions] = True
            self._mark_due(np.concatenate([company, positions]))
        else:
            self._is_full[positions] = True

    def _mark_due(self, positions: Positions) -> None:
        if len(positions):
            self._full_gradients -= int(self._counts[positions[self._is_full[positions]]].sum())
            self._is_full[positions] = False
            self._is_due[positions] = True
            self._due.append(positions)
            self._move("waiting", "due", self._counts[positions])

    def _move(self, origin: str, outcome: str, counts: npt.NDArray[np.int64]) -> None:
        by_source = counts.sum(0)
        self.outcomes[origin] -= by_source
        self.outcomes[outcome] += by_source
