"""A binary tree with an item at each leaf: its shape, its clustering, and the ids of its nodes.

Legend: K items, D width of their vectors, L depth of the leaves; the root is level 0. A node is known by its level and
its slot there, from 0 to 2^level - 1; its children have the slots 2·slot and 2·slot + 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.arrays import as_array
from geartrain.ams.values.errors import InvalidArgument, InvalidIds
from geartrain.ams.values.specs import Ids

Floats = npt.NDArray[np.float32]

_ROUNDS = 10
"""Of two centers that move to the means of their halves."""


class ItemTree:
    """A balanced binary tree over K items, all leaves at one level.

        tree = gt.ItemTree.from_vectors(item_ids, vectors)     # items near each other are near in the tree
        tree.node_ids(items)                                   # [N, L]: the nodes above each, and its leaf

    The halves of a node's items differ by one at most, so that L = ⌈log2 K⌉. The id of a leaf is ``2·item + 1``, and
    does not change with the tree; those of inner nodes are even.
    """

    def __init__(self, items: Any) -> None:
        """Put ``items`` [K] in a row and halve it until single items are left: neighbours stay together.

        Raises InvalidIds for items that occur twice, are negative or >= 2^62, or are fewer than two.
        """
        given = as_array(items, InvalidIds, "items")
        if given.ndim != 1 or given.dtype.kind not in "iu" or len(given) < 2:
            raise InvalidIds(f"items are {given.dtype} {list(given.shape)}; they must be integers [K], at least two")
        if int(given.min()) < 0 or int(given.max()) >= 2**62:
            raise InvalidIds(f"items go from {given.min()} to {given.max()}; they must lie in [0, 2^62)")
        self.items: Ids = given.astype(np.int64)
        """[K], from the left to the right."""
        self._places = np.argsort(self.items, kind="stable")
        self._sorted = self.items[self._places]
        if len(twice := np.flatnonzero(self._sorted[1:] == self._sorted[:-1])):
            raise InvalidIds(f"item {self._sorted[twice[0]]} occurs twice among the items; give each once")
        self.depth = int(len(self.items) - 1).bit_length()
        """L."""
        counts = np.array([len(self.items)])
        self._slots: list[Ids] = [np.zeros(1, np.int64)]
        for _ in range(self.depth):
            counts = np.stack([counts - counts // 2, counts // 2], 1).reshape(-1)
            self._slots.append(np.flatnonzero(counts).astype(np.int64))

    @classmethod
    def from_vectors(cls, items: Any, vectors: Any) -> ItemTree:
        """The tree of ``items`` [K] by their ``vectors`` [K, D]: each node's are parted by 2-means into equal halves.

        Two centers begin at items far from each other; the half that is nearer to the one than to the other moves it to
        its mean, ten times. Costs O(K·D·log K). Raises InvalidArgument for vectors of another shape, or not finite.
        """
        unordered = cls(items)
        points = np.asarray(as_array(vectors, InvalidArgument, "vectors"), np.float32)
        if points.ndim != 2 or len(points) != len(unordered.items) or not np.isfinite(points).all():
            raise InvalidArgument(
                f"the vectors have shape {list(points.shape)}; they must be finite and [{len(unordered.items)}, D]"
            )
        order = np.arange(len(points))
        segments = [(0, len(points))]
        while segments:
            further = []
            for begin, end in segments:
                part = order[begin:end]
                half = len(part) - len(part) // 2
                order[begin:end] = part[_left_first(points[part], half)]
                further += [(begin, begin + half), (begin + half, end)]
            segments = [(begin, end) for begin, end in further if end - begin > 1]
        return cls(unordered.items[order])

    def slots_at(self, level: int) -> Ids:
        """Those of the nodes of a level, rising."""
        return self._slots[level]

    def slots_of(self, items: Any) -> Ids:
        """The slots [N] of the leaves of ``items`` [N]. Raises InvalidIds that names one that is not in the tree."""
        wanted = np.asarray(as_array(items, InvalidIds, "items"))
        places = np.minimum(np.searchsorted(self._sorted, wanted), len(self.items) - 1)
        if len(missing := np.flatnonzero(self._sorted[places] != wanted)):
            raise InvalidIds(f"item {wanted[missing[0]]} is not in the tree, which has {len(self.items):,}")
        return self._slots[self.depth][self._places[places]]

    def node_ids(self, items: Any) -> Ids:
        """The ids [N, L] of the nodes on the way to each of ``items`` [N], from level 1 to its leaf."""
        slots = self.slots_of(items)
        above = [self.ids_at(level, slots >> (self.depth - level)) for level in range(1, self.depth + 1)]
        return np.stack(above, 1)

    def ids_at(self, level: int, slots: Ids) -> Ids:
        """The ids, of the same shape, of nodes of a level."""
        if level == self.depth:
            return leaf_ids(self.items_at(slots))
        return 2 * ((1 << level) - 1 + slots)

    def items_at(self, slots: Ids) -> Ids:
        """The items, of the same shape, at leaves; those of slots that are not there mean nothing."""
        places = np.searchsorted(self._slots[self.depth], slots)
        return self.items[np.minimum(places, len(self.items) - 1)]

    def children(self, level: int, slots: Ids) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """The slots [..., 2n] at ``level`` of the children of nodes [..., n] of the level above; which are there."""
        below = np.stack([2 * slots, 2 * slots + 1], -1).reshape(*slots.shape[:-1], -1)
        known = self._slots[level]
        is_there = known[np.minimum(np.searchsorted(known, below), len(known) - 1)] == below
        return below, is_there

    def others(self, level: int, slots: Ids, count: int, rng: np.random.Generator) -> Ids:
        """For each of ``slots`` [N], ``count`` other nodes [N, count] of that level, drawn evenly, repetitions too."""
        known = self._slots[level]
        own = np.searchsorted(known, slots)[:, None]
        drawn = rng.integers(0, len(known) - 1, (len(slots), count))
        return known[drawn + (drawn >= own)]


def leaf_ids(items: Any) -> Ids:
    """The ids, of the same shape, of the leaves of items: those by which a history is looked up among the nodes."""
    return 2 * np.asarray(items, np.int64) + 1


def _left_first(points: Floats, half: int) -> npt.NDArray[np.int64]:
    """The order of the points [n, D] by which the first ``half`` belong together."""
    left = points[_farthest(points, points.mean(0))]
    right = points[_farthest(points, left)]
    order = np.arange(len(points))
    for _ in range(_ROUNDS if len(points) > 2 else 0):
        # The difference of the squared distances to both, but for what is equal for all points.
        found = np.argsort(points @ (right - left), kind="stable")
        if (found == order).all():
            break
        order = found
        left, right = points[order[:half]].mean(0), points[order[half:]].mean(0)
    return order


def _farthest(points: Floats, center: Floats) -> int:
    return int(np.square(points - center).sum(1).argmax())
