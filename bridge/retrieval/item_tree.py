"""Binary tree with an item at each leaf: its shape, its clustering, and the ids of its nodes.

Legend: K items, D width of their vectors, L depth of the leaves; the root is level 0. A node is given by its level and
its slot in it, from 0 to 2^level - 1; its children have the slots 2·slot and 2·slot + 1.
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
"""Iterations in which both centers move to the means of their halves."""


class ItemTree:
    """Balanced binary tree over K items, all leaves at one level.

        tree = gt.ItemTree.from_vectors(item_ids, vectors)     # items near each other are near in the tree
        tree.node_ids(items)                                   # [N, L]: the nodes above each, and its leaf

    The halves of a node's items differ by at most one, so L = ⌈log2 K⌉. The id of a leaf is ``2·item + 1``, whatever
    the tree; ids of inner nodes are even.
    """

    def __init__(self, items: Any) -> None:
        """Halve the sequence of ``items`` [K] until single items are left: neighbours stay together.

        Raises InvalidIds for items that occur twice, are negative or >= 2^62, or are fewer than two.
        """
        given = as_array(items, InvalidIds, "items")
        if given.ndim != 1 or given.dtype.kind not in "iu" or len(given) < 2:
            raise InvalidIds(f"items are {given.dtype} {list(given.shape)}; they must be integers [K], at least two")
        if int(given.min()) < 0 or int(given.max()) >= 2**62:
            raise InvalidIds(f"items go from {given.min()} to {given.max()}; they must lie in [0, 2^62)")
        self.items: Ids = given.astype(np.int64)
        """[K], from left to right."""
        self._places = np.argsort(self.items, kind="stable")
        self._sorted = self.items[self._places]
        if len(twice := np.flatnonzero(self._sorted[1:] == self._sorted[:-1])):
            raise InvalidIds(f"item {self._sorted[twice[0]]} occurs twice among the items; give each once")
        self.depth = int(len(self.items) - 1).bit_length()
        """Depth of the leaves (L)."""
        counts = np.array([len(self.items)])
        self._slots: list[Ids] = [np.zeros(1, np.int64)]
        for _ in range(self.depth):
            counts = np.stack([counts - counts // 2, counts // 2], 1).reshape(-1)
            self._slots.append(np.flatnonzero(counts).astype(np.int64))

    @classmethod
    def from_vectors(cls, items: Any, vectors: Any) -> ItemTree:
        """Return the tree of ``items`` [K] by their ``vectors`` [K, D]; 2-means splits each node's into equal halves.

        Two centers start at items far from each other. Ten times, the half that is nearer to one than to the other
        moves the center to its mean. Costs O(K·D·log K). Raises InvalidArgument for vectors of another shape, or not
        finite.
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
                order[begin:end] = part[_balanced_order(points[part], half)]
                further += [(begin, begin + half), (begin + half, end)]
            segments = [(begin, end) for begin, end in further if end - begin > 1]
        return cls(unordered.items[order])

    def slots_at(self, level: int) -> Ids:
        """Return the slots of a level's nodes, ascending."""
        return self._slots[level]

    def slots_of(self, items: Any) -> Ids:
        """Return the slots [N] of the leaves of ``items`` [N]. Raises InvalidIds that names one not in the tree."""
        wanted = np.asarray(as_array(items, InvalidIds, "items"))
        places = np.minimum(np.searchsorted(self._sorted, wanted), len(self.items) - 1)
        if len(missing := np.flatnonzero(self._sorted[places] != wanted)):
            raise InvalidIds(
                f"item {wanted[missing[0]]} is not in the tree, which has {len(self.items):,}; make a tree with it"
            )
        return self._slots[self.depth][self._places[places]]

    def node_ids(self, items: Any) -> Ids:
        """Return the ids [N, L] of the nodes on the way to each of ``items`` [N], from level 1 to its leaf."""
        slots = self.slots_of(items)
        above = [self.ids_at(level, slots >> (self.depth - level)) for level in range(1, self.depth + 1)]
        return np.stack(above, 1)

    def ids_at(self, level: int, slots: Ids) -> Ids:
        """Return the ids of a level's nodes, in the shape of ``slots``."""
        if level == self.depth:
            return leaf_ids(self.items_at(slots))
        return 2 * ((1 << level) - 1 + slots)

    def items_at(self, slots: Ids) -> Ids:
        """Return the items at leaves, in the shape of ``slots``; undefined for slots that do not exist."""
        places = np.searchsorted(self._slots[self.depth], slots)
        return self.items[np.minimum(places, len(self.items) - 1)]

    def children(self, level: int, slots: Ids) -> tuple[Ids, npt.NDArray[np.bool_]]:
        """Return slots [..., 2n] at ``level`` of the children of nodes [..., n], and whether each exists."""
        below = np.stack([2 * slots, 2 * slots + 1], -1).reshape(*slots.shape[:-1], 2 * slots.shape[-1])
        known = self._slots[level]
        is_there = known[np.minimum(np.searchsorted(known, below), len(known) - 1)] == below
        return below, is_there

    def others(self, level: int, slots: Ids, count: int, rng: np.random.Generator) -> Ids:
        """Return ``count`` other nodes [N, count] of a level for each of ``slots`` [N], drawn evenly, with repeats."""
        known = self._slots[level]
        own = np.searchsorted(known, slots)[:, None]
        drawn = rng.integers(0, len(known) - 1, (len(slots), count))
        return known[drawn + (drawn >= own)]


def leaf_ids(items: Any) -> Ids:
    """Return the ids of items' leaves, in their shape; a history looks them up among the nodes."""
    return 2 * np.asarray(items, np.int64) + 1


def _balanced_order(points: Floats, half: int) -> npt.NDArray[np.int64]:
    """Split the points [n, D] into two clusters; return an order in which the first ``half`` are one cluster."""
    left = points[_argmax_distance(points, points.mean(0))]
    right = points[_argmax_distance(points, left)]
    order = np.arange(len(points))
    for _ in range(_ROUNDS if len(points) > 2 else 0):
        # Difference of the squared distances to both centers, up to a constant.
        found = np.argsort(points @ (right - left), kind="stable")
        if (found == order).all():
            break
        order = found
        left, right = points[order[:half]].mean(0), points[order[half:]].mean(0)
    return order


def _argmax_distance(points: Floats, center: Floats) -> int:
    return int(np.square(points - center).sum(1).argmax())
