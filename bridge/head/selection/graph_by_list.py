"""Graph of nearest classes, divided: each rank keeps the lists of the classes whose rows it has.

Each rank builds, updates and saves its own lists: 4·C·k / R + 8·C / R bytes. Steps select by another division of the
graph (``graph_by_neighbour.py``). Every rank makes the same calls in the same order.

Legend: C classes, k neighbours of a class, R ranks.
"""

from __future__ import annotations

import numpy as np
import torch

from geartrain.ams.graph.building.neighbours import NeighbourIds, NeighbourTable, id_dtype
from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.bridge.collectives.communicator import Communicator

_STRIP = 1 << 16


class GraphParts:
    """Division of the lists: each rank has those of class ids ``first`` … ``stop`` − 1, with their rows."""

    def __init__(self, link: Communicator, first: int, stop: int) -> None:
        self.link, self._first, self._stop = link, first, stop

    def cut(self, table: NeighbourTable, live_classes: LiveClasses) -> NeighbourTable:
        """Return this rank's part of a whole table in numbers of ``live_classes``."""
        return table.part(*self.bounds(live_classes))

    def bounds(self, live_classes: LiveClasses) -> tuple[int, int]:
        """Return the number of this rank's first class, and of the next rank's."""
        return live_classes.num_below(self._first), live_classes.num_below(self._stop)

    @property
    def classes(self) -> range:
        """Classes whose lists this rank has, if they live."""
        return range(self._first, self._stop)

    def whole(self, table: NeighbourTable) -> NeighbourTable | None:
        """Return the whole table on rank 0, None on the others. 4·C·k + 8·C bytes there."""
        link = self.link
        sizes = link.exchange([table.num_lists, len(table.neighbours)])
        own = torch.from_numpy(np.diff(table.offsets)), torch.from_numpy(table.neighbours)
        if link.rank:
            link.start_transfers([(part, 0) for part in own if len(part)], []).result()
            return None
        rooms = [(own[0].new_empty(lists), own[1].new_empty(entries)) for lists, entries in sizes[1:]]
        arriving = [(room, rank) for rank, pair in enumerate(rooms, 1) for room in pair if len(room)]
        link.start_transfers([], arriving).result()
        lengths, neighbours = (torch.cat(parts).numpy() for parts in zip(own, *rooms, strict=True))
        return NeighbourTable(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64), neighbours, table.k)


def lists_by_class(table: NeighbourTable | None, live_classes: LiveClasses, classes: range, k: int) -> NeighbourIds:
    """Return the lists of these classes [L, k] in their saved form: by class id, filled up with −1, live or not.
    ``table``, of the live classes among them, has lists of at most k; None: all are empty."""
    lists_LK = np.full((len(classes), k), -1, id_dtype(live_classes.num_classes))
    if table is not None:
        lengths = np.diff(table.offsets)
        owners = np.flatnonzero(live_classes.holds(np.arange(classes.start, classes.stop)))
        for start in range(0, len(owners), _STRIP):
            some = lengths[start : start + _STRIP]
            entries = table.neighbours[table.offsets[start] : table.offsets[start + len(some)]]
            filled = np.full((len(some), k), -1, lists_LK.dtype)
            filled[np.arange(k) < some[:, None]] = entries
            lists_LK[owners[start : start + _STRIP]] = filled
    return lists_LK


def table_of_lists(
    lists_LK: NeighbourIds, live_classes: LiveClasses, classes: range, k: int, *, is_part: bool
) -> NeighbourTable:
    """Return the table, or part of one, from which :func:`lists_by_class` made the lists."""
    first, stop = (live_classes.num_below(end) for end in (classes.start, classes.stop))
    listed_LK = lists_LK >= 0
    lengths = listed_LK.sum(1)[live_classes.holds(np.arange(classes.start, classes.stop))]
    offsets = np.zeros(stop - first + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    neighbours: NeighbourIds = lists_LK[listed_LK].astype(id_dtype(live_classes.num_live_classes), copy=False)
    return NeighbourTable(offsets, neighbours, k, first, live_classes.num_live_classes if is_part else None)
