"""LRU index of a feature store: ids, sizes of records, order of eviction."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels.position_lru import PositionLru, Positions
from geartrain.ams.values.specs import Ids

_FIRST_CAPACITY = 1024
_EVICTED_AT_ONCE = 256


class ByteLru:
    """Exact order of last use over any number of ids, bounded by their bytes. Not thread-safe.

    64 bytes a position; O(1) a use.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self.total_bytes = 0
        self._index = PositionLru(_FIRST_CAPACITY)
        self._sizes = np.zeros(_FIRST_CAPACITY, np.int64)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def capacity(self) -> int:
        """Number of positions; every position returned is below it."""
        return self._index.capacity

    def use(self, ids: Ids) -> Positions:
        """Return the positions [N], -1 for an absent id; mark the others as used now."""
        return self._index.find(ids, touch=True)

    def insert(self, ids: Ids, sizes: npt.NDArray[np.int64]) -> tuple[Positions, Ids, Positions]:
        """Insert distinct ids [N] of these sizes, each within ``max_bytes``, as used now.

        Returns their positions [N], and the evicted ids with their former positions. If they do not fit together, the
        first are evicted again.
        """
        self.reserve(len(ids))
        positions, _ = self._index.place(ids)
        self.total_bytes += int((sizes - self._sizes[positions]).sum())
        self._sizes[positions] = sizes
        return positions, *self._evict()

    def reserve(self, count: int) -> None:
        """Grow the arrays for ``count`` more ids. Changes nothing if memory fails."""
        if len(self._index) + count <= self.capacity:
            return
        capacity = max(2 * self.capacity, len(self._index) + count)
        sizes = np.concatenate([self._sizes, np.zeros(capacity - len(self._sizes), np.int64)])
        self._index.grow(capacity)
        self._sizes = sizes

    def drop(self, ids: Ids) -> tuple[Ids, Positions]:
        """Remove these ids; return those that were present, with their former positions."""
        positions = self._index.remove(ids)
        held = positions >= 0
        positions = positions[held]
        self.total_bytes -= int(self._sizes[positions].sum())
        self._sizes[positions] = 0
        return ids[held], positions

    def _evict(self) -> tuple[Ids, Positions]:
        gone_ids, gone_positions = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        while self.max_bytes is not None and self.total_bytes > self.max_bytes:
            ids, positions = self._index.oldest(_EVICTED_AT_ONCE)
            freed = np.cumsum(self._sizes[positions])
            enough = int(np.searchsorted(freed, self.total_bytes - self.max_bytes)) + 1
            ids, positions = self.drop(ids[:enough])
            gone_ids.append(ids)
            gone_positions.append(positions)
        return np.concatenate(gone_ids), np.concatenate(gone_positions)
