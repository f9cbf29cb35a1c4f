"""LRU index of slab positions by id, for caches and queues.

``tests/specification/position_lru.py`` is the specification. N ids of one call; positions are int64 [N].
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels import _core
from geartrain.ams.kernels.ops import checked_ids
from geartrain.ams.values.errors import InvalidArgument, InvalidIds
from geartrain.ams.values.specs import Ids

Positions = npt.NDArray[np.int64]
MAX_POSITIONS = 2**31 - 2


class PositionLru:
    """Index id → position in [0, capacity), in order of last use.

    Each id costs O(1); an entry takes 48 to 64 bytes. Each call is atomic for the threads of a process: it holds the
    GIL, about 10 µs for 1,000 ids.
    """

    def __init__(self, capacity: int) -> None:
        """Raise InvalidArgument unless 1 <= capacity <= 2**31 - 2."""
        self._index = _core.PositionLru(_checked(capacity))

    def __len__(self) -> int:
        return self._index.size

    @property
    def capacity(self) -> int:
        """Most ids that can have a position."""
        return self._index.capacity

    def find(self, ids: Ids, *, touch: bool) -> Positions:
        """Return the position of each id [N], or -1. ``touch``: found ids count as used now, in order."""
        ids = checked_ids(ids)
        positions = np.empty_like(ids)
        self._index.find(ids, positions, touch)
        return positions

    def place(self, ids: Ids) -> tuple[Positions, int]:
        """Assign each id its position [N] and make it the most recently used, in order.

        If no position is free, the least recently used id loses its own; also returns the number of ids that did.

        Args:
            ids: [N] distinct (the caller's duty), at most ``capacity``.

        Raises:
            InvalidIds: there are more than ``capacity``.
        """
        ids = checked_ids(ids)
        if len(ids) > self.capacity:
            raise InvalidIds(f"{len(ids)} ids were given at once; there are {self.capacity} positions: grow() first")
        positions = np.empty_like(ids)
        return positions, self._index.place(ids, positions)

    def remove(self, ids: Ids) -> Positions:
        """Free the positions of these ids; return them [N], -1 where there was none."""
        ids = checked_ids(ids)
        positions = np.empty_like(ids)
        self._index.remove(ids, positions)
        return positions

    def oldest(self, count: int) -> tuple[Ids, Positions]:
        """Return up to ``count`` ids and their positions, the least recently used first. O(count)."""
        count = min(count, len(self))
        ids, positions = np.empty(count, np.int64), np.empty(count, np.int64)
        self._index.oldest(ids, positions)
        return ids, positions

    def grow(self, capacity: int) -> None:
        """Grow to at least this many positions; present ones stay. O(capacity) where it is more than before."""
        self._index.grow(_checked(capacity))


def _checked(capacity: int) -> int:
    if not 1 <= capacity <= MAX_POSITIONS:
        raise InvalidArgument(f"capacity is {capacity}; it must lie in [1, {MAX_POSITIONS}]")
    return capacity
