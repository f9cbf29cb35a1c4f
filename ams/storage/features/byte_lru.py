"""Which ids a store holds, how large they are, and which go first when it is full."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels.position_lru import SlotIndex, Slots
from geartrain.ams.values.specs import Ids

_FIRST_CAPACITY = 1024
_EVICTED_AT_ONCE = 256


class ByteLru:
    """Exact order of last use over any number of ids, bounded by their bytes. Not thread-safe.

    64 bytes a slot; O(1) a use.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self.total_bytes = 0
        self._index = SlotIndex(_FIRST_CAPACITY)
        self._sizes = np.zeros(_FIRST_CAPACITY, np.int64)

    def __len__(self) -> int:
        return len(self._index)

    @property
    def capacity(self) -> int:
        """Slots there are; every slot returned is below it."""
        return self._index.capacity

    def use(self, ids: Ids) -> Slots:
        """Return the slots [N], -1 where an id is not held; held ones count as used now."""
        return self._index.find(ids, touch=True)

    def hold(self, ids: Ids, sizes: npt.NDArray[np.int64]) -> tuple[Slots, Ids, Slots]:
        """Hold distinct ids [N] of these sizes, each within ``max_bytes``, as used now.

        Returns their slots [N], and the ids dropped for them with the slots that these had. Of more than fit together
        the first are dropped again.
        """
        self.make_room(len(ids))
        slots, _ = self._index.place(ids)
        self.total_bytes += int((sizes - self._sizes[slots]).sum())
        self._sizes[slots] = sizes
        return slots, *self._evict()

    def make_room(self, count: int) -> None:
        """Have slots for ``count`` more ids. Changes nothing if memory fails."""
        if len(self._index) + count <= self.capacity:
            return
        capacity = max(2 * self.capacity, len(self._index) + count)
        sizes = np.concatenate([self._sizes, np.zeros(capacity - len(self._sizes), np.int64)])
        self._index.grow(capacity)
        self._sizes = sizes

    def drop(self, ids: Ids) -> tuple[Ids, Slots]:
        """Let go of these; return those that were held, with the slots that they had."""
        slots = self._index.remove(ids)
        held = slots >= 0
        slots = slots[held]
        self.total_bytes -= int(self._sizes[slots].sum())
        self._sizes[slots] = 0
        return ids[held], slots

    def _evict(self) -> tuple[Ids, Slots]:
        gone_ids, gone_slots = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        while self.max_bytes is not None and self.total_bytes > self.max_bytes:
            ids, slots = self._index.oldest(_EVICTED_AT_ONCE)
            freed = np.cumsum(self._sizes[slots])
            enough = int(np.searchsorted(freed, self.total_bytes - self.max_bytes)) + 1
            ids, slots = self.drop(ids[:enough])
            gone_ids.append(ids)
            gone_slots.append(slots)
        return np.concatenate(gone_ids), np.concatenate(gone_slots)
