"""A graph of nearest classes that is cut: each rank keeps the lists of the classes whose rows it has.

A step asks the owners of its labels for their lists, by one all-reduce of what each rank has of them: 4·P·k bytes on a
device, and on the host, which stops where it has enough, about 4·(labels and neighbours that are active). A rank holds
4·C·k / R + 8·C / R bytes, and saves its lists itself. Every rank makes the same calls in the same order.

Legend: C classes, P distinct labels of all ranks, k neighbours of a class, R ranks, N of them asked for at a time.
"""

from __future__ import annotations

import numpy as np
import torch

from geartrain.ams.graph.building.neighbours import NeighbourIds, NeighbourTable, id_dtype
from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.values.specs import Ids
from geartrain.bridge.collectives.communicator import Communicator

_STRIP = 1 << 16


class GraphParts:
    """Where the lists of the classes are: with the rows of class ids ``first`` … ``stop`` − 1 of each rank."""

    def __init__(self, link: Communicator, first: int, stop: int) -> None:
        self.link, self._first, self._stop = link, first, stop

    def cut(self, table: NeighbourTable, live_classes: LiveClasses) -> NeighbourTable:
        """The part of this rank, of a whole table in numbers of ``live_classes``."""
        return table.part(*self.bounds(live_classes))

    def bounds(self, live_classes: LiveClasses) -> tuple[int, int]:
        """Number of the first class of this rank, and of the first of the next one."""
        return live_classes.num_below(self._first), live_classes.num_below(self._stop)

    def near(self, table: NeighbourTable, labels_P: Ids, most: int) -> Ids:
        """The first ``most`` of: the labels, the nearest neighbour of each, the second ones, …; each class once.

        ``table`` is this rank's part; the labels are distinct, rise, and are the same on every rank.
        """
        chosen, asked = labels_P, 0
        while len(chosen) < most and asked < table.k and len(labels_P):
            # One more than would be enough if no class came twice.
            stop = min(table.k, asked + 1 - (len(chosen) - most) // len(labels_P))
            own_PN = torch.from_numpy(_lists_of(table, labels_P, range(asked, stop)) + 1)
            found_NP = (self.link.sum(own_PN) - 1).numpy().T  # the lists of a label are on one rank
            both = np.concatenate([chosen, found_NP[found_NP >= 0]])
            chosen = both[np.sort(np.unique(both, return_index=True)[1])]
            asked = stop
        return chosen[:most]

    @property
    def classes(self) -> range:
        """Whose lists this rank has, if they live."""
        return range(self._first, self._stop)

    def whole(self, table: NeighbourTable) -> NeighbourTable | None:
        """The table put together on rank 0; None on the others. 4·C·k + 8·C bytes there."""
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
    """The lists of these classes [L, k], by class id, filled up with −1, as they are saved: a range of rows whatever
    lives. ``table``, of the classes among them that live, has lists of k at most; None: all are empty."""
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
    """The table of which :func:`lists_by_class` made the lists; a part of one, or the whole."""
    first, stop = (live_classes.num_below(end) for end in (classes.start, classes.stop))
    listed_LK = lists_LK >= 0
    lengths = listed_LK.sum(1)[live_classes.holds(np.arange(classes.start, classes.stop))]
    offsets = np.zeros(stop - first + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    neighbours: NeighbourIds = lists_LK[listed_LK].astype(id_dtype(live_classes.num_living), copy=False)
    return NeighbourTable(offsets, neighbours, k, first, live_classes.num_living if is_part else None)


def _lists_of(table: NeighbourTable, labels_P: Ids, ranks: range) -> NeighbourIds:
    """[P, N] those of these ``ranks`` in each label's list; -1 where it has ended, and for classes without one here."""
    at_P = labels_P - table.first
    here_P = (at_P >= 0) & (at_P < table.num_lists)
    begins_P, ends_P = (np.where(here_P, table.offsets[np.where(here_P, at_P + end, 0)], 0) for end in (0, 1))
    places_PN = begins_P[:, None] + np.array(ranks)
    found_PN = np.full(places_PN.shape, -1, table.neighbours.dtype)
    listed_PN = places_PN < ends_P[:, None]
    found_PN[listed_PN] = table.neighbours[places_PN[listed_PN]]
    return found_PN
