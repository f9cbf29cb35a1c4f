"""Which slot of a slab an id has, and which ids were used least recently: the index of caches and queues.

:class:`geartrain.ams.kernels.reference.slots.SlotIndex` is the specification. N ids of one call; slots are int64 [N].
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels import _core
from geartrain.ams.kernels.ops import checked_ids
from geartrain.ams.values.errors import InvalidArgument, InvalidIds
from geartrain.ams.values.specs import Ids

Slots = npt.NDArray[np.int64]
MOST_SLOTS = 2**31 - 2


class SlotIndex:
    """id → slot in [0, capacity), in order of last use.

    Each id costs O(1); an entry takes 48 to 64 bytes. Each call is atomic for the threads of a process: it holds the
    GIL, about 10 µs for 1,000 ids.
    """

    def __init__(self, capacity: int) -> None:
        """Raises InvalidArgument unless 1 <= capacity <= 2**31 - 2."""
        self._index = _core.SlotIndex(_checked(capacity))

    def __len__(self) -> int:
        return self._index.size

    @property
    def capacity(self) -> int:
        """How many ids can have a slot."""
        return self._index.capacity

    def find(self, ids: Ids, *, touch: bool) -> Slots:
        """Return the slot of each id [N], or -1. ``touch``: what is found becomes the most recently used, in order."""
        ids = checked_ids(ids)
        slots = np.empty_like(ids)
        self._index.find(ids, slots, touch)
        return slots

    def place(self, ids: Ids) -> tuple[Slots, int]:
        """Give each id its slot [N] and make it the most recently used, in order.

        Where no slot is free, the least recently used id loses its own; returns how many did.

        Args:
            ids: [N] distinct (the caller's duty), at most ``capacity``.

        Raises:
            InvalidIds: there are more than ``capacity``.
        """
        ids = checked_ids(ids)
        if len(ids) > self.capacity:
            raise InvalidIds(f"{len(ids)} ids were given at once; there are {self.capacity} slots: grow() first")
        slots = np.empty_like(ids)
        return slots, self._index.place(ids, slots)

    def remove(self, ids: Ids) -> Slots:
        """Free the slots of these ids; return them [N], -1 where there was none."""
        ids = checked_ids(ids)
        slots = np.empty_like(ids)
        self._index.remove(ids, slots)
        return slots

    def oldest(self, count: int) -> tuple[Ids, Slots]:
        """Return up to ``count`` ids and their slots, the least recently used first. O(count)."""
        count = min(count, len(self))
        ids, slots = np.empty(count, np.int64), np.empty(count, np.int64)
        self._index.oldest(ids, slots)
        return ids, slots

    def grow(self, capacity: int) -> None:
        """Have at least this many slots; those given keep their numbers. O(capacity) where it is more than before."""
        self._index.grow(_checked(capacity))


def _checked(capacity: int) -> int:
    if not 1 <= capacity <= MOST_SLOTS:
        raise InvalidArgument(f"capacity is {capacity}; it must lie in [1, {MOST_SLOTS}]")
    return capacity
