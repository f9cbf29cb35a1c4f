"""Changes of a graph of nearest classes between two builds, when classes are added or retired.

Legend: L live classes before, L' after, E entries of all lists, k neighbours of a class, N new classes, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.graph.building.neighbours import NeighbourTable, id_dtype
from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.values.specs import Ids

Floats = npt.NDArray[np.float32]
BLOCK_BYTES = 8 << 20


def renumbered(
    table: NeighbourTable, before: LiveClasses, after: LiveClasses, bounds: tuple[int, int] | None = None
) -> NeighbourTable:
    """Return the same lists in the numbers of ``after``, without the classes retired since; new ones have empty lists.

    For a part of a table, ``bounds`` are its classes in the numbers of ``after``. O(C + E) time, 5 · E bytes beside the
    table.
    """
    stay = after.holds(before.all_ids)
    numbers: Ids = np.where(stay, after.numbers(before.all_ids), -1)
    new_number = numbers.astype(id_dtype(after.num_live_classes))
    moved: npt.NDArray[Any] = new_number[table.neighbours]
    kept = np.append(moved >= 0, False)
    counts = np.add.reduceat(kept, table.offsets[:-1], dtype=np.int64)[: table.num_lists]
    counts[np.diff(table.offsets) == 0] = 0
    owners = slice(table.first, table.first + table.num_lists)
    stay = stay[owners]
    first, stop = bounds or (0, after.num_live_classes)
    lists = np.zeros(stop - first, np.int64)
    lists[new_number[owners][stay] - first] = counts[stay]
    kept[:-1] &= np.repeat(stay, np.diff(table.offsets))  # the lists of retired classes are removed, too
    return NeighbourTable(_offsets(lists), moved[kept[:-1]], table.k, first, bounds and after.num_live_classes)


def with_new(table: NeighbourTable, new: Ids, nearest_NK: Ids) -> NeighbourTable:
    """Give the classes ``new`` [N], whose lists are empty, the lists ``nearest_NK``, and insert them at the front of
    the lists of those classes, which lose their last entries above k. A part of a table takes those of its own classes.

    The right place of a new class in another's list is unknown without the scores of the rest; at the front it is
    certain to be selected. The next build corrects it. O(E) time.
    """
    count = nearest_NK.shape[1]
    others = ~np.isin(nearest_NK, new)  # the ``new`` ones already have lists of each other
    # Column by column, so that of several new classes the nearer comes first.
    owners = np.concatenate([nearest_NK.T[others.T], np.repeat(new, count)])
    entries = np.concatenate([np.tile(new, (count, 1))[others.T], nearest_NK.ravel()])
    owners = owners - table.first
    here = (owners >= 0) & (owners < table.num_lists)
    owners, entries = owners[here], entries[here]
    order = np.argsort(owners, kind="stable")  # an empty list begins where the next one does
    owners, entries = owners[order], entries[order].astype(table.neighbours.dtype)
    lists = np.diff(table.offsets) + np.bincount(owners, minlength=table.num_lists)
    longer = np.insert(table.neighbours, table.offsets[owners], entries)
    offsets = _offsets(lists)
    excess = np.maximum(lists - table.k, 0)
    cut = np.flatnonzero(excess)
    ends = np.repeat(offsets[cut + 1], excess[cut])
    backwards = np.arange(len(ends)) - np.repeat(np.cumsum(excess[cut]) - excess[cut], excess[cut])
    shorter = np.delete(longer, ends - 1 - backwards)
    return NeighbourTable(_offsets(lists - excess), shorter, table.k, table.first, table.total)


def nearest_classes(read: Callable[[Ids], Floats], num_classes: int, dim: int, numbers: Ids, k: int) -> Ids:
    """Return numbers [N, min(k, L' − 1)] of the classes nearest to ``numbers`` [N] by cosine, best first, without
    themselves.

    ``read`` returns rows [n, D] float32 by number. Costs one pull of all rows and 2 · N · L' · D operations.
    """
    kept = min(k, num_classes - 1)
    queries_ND = _unit(read(numbers))
    best, found = np.empty((len(numbers), 0), np.float32), np.empty((len(numbers), 0), np.int64)
    step = max(1, BLOCK_BYTES // (4 * max(dim, len(numbers))))
    for start in range(0, num_classes, step):
        ids = np.arange(start, min(start + step, num_classes), dtype=np.int64)
        scores = queries_ND @ _unit(read(ids)).T
        scores[numbers[:, None] == ids] = -np.inf
        best = np.concatenate([best, scores], axis=1)
        found = np.concatenate([found, np.broadcast_to(ids, scores.shape)], axis=1)
        order = np.argsort(-best, axis=1, kind="stable")[:, :kept]
        best, found = np.take_along_axis(best, order, 1), np.take_along_axis(found, order, 1)
    return found


def _unit(rows_ND: Floats) -> Floats:
    lengths = np.linalg.norm(rows_ND, axis=1, keepdims=True)
    return np.asarray(rows_ND / np.where(lengths > 0, lengths, 1), np.float32)


def _offsets(lengths: Ids) -> Ids:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
