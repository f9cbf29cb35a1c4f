"""Graph of nearest classes divided by neighbour: of every class's list a rank keeps the neighbours whose rows it has
(100-million-class paper, section 3.2.3), and so finds its active classes without the lists of others.

All ranks together select what the whole graph would: the labels, the nearest neighbour of each, the second ones, …, up
to a number of classes. A class lies on one rank, which alone finds its first place in that order; the ranks find the
end of the selection together, by counts (``joint_limit.py``): at most 8·k bytes a step from k = 32 on, for neighbours
and random classes together.

Legend: C classes, E entries of lists on this rank, B labels of all ranks, k neighbours of a class, r the longest list
here, A active classes, M = (1 + r)·B candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.kernels.ops import sample_ids
from geartrain.ams.programs.selection import ActiveClasses, is_member
from geartrain.ams.values.specs import Ids
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.collectives.joint_limit import joint_limit
from geartrain.bridge.kernels.sampling import candidates_here

_STRIP = 1 << 22
"""Entries divided at a time, about."""
_NONE = torch.iinfo(torch.int64).max


@dataclass(frozen=True, eq=False, kw_only=True)
class OwnNeighbours:
    """Lists of all classes, shortened to the classes of one rank (CSR): 8·C + 6·E bytes, E = C·k / R on average."""

    offsets: Tensor
    """Starts of the lists, int64 [C + 1]."""
    neighbours: Tensor
    """Neighbours, int32 or int64 [E], E >= 1."""
    ranks: Tensor
    """Place of each neighbour in the whole list, from 0 on; int16 or int32 [E]."""
    longest: int
    """Number of entries of the longest list here."""
    k: int
    first: int
    stop: int
    """End of this rank's classes, ``first`` … ``stop`` − 1."""
    link: Communicator

    @property
    def num_classes(self) -> int:
        """Number of classes, C."""
        return len(self.offsets) - 1

    @staticmethod
    def bytes_for(num_classes: int, k: int, num_ranks: int) -> int:
        """Return the bytes of one rank, on average."""
        return 8 * (num_classes + 1) + 6 * -(-num_classes * min(k, num_classes - 1) // num_ranks)

    @staticmethod
    def of(table: NeighbourTable, link: Communicator) -> OwnNeighbours:
        """Divide the graph of which ``table`` is this rank's part; collective, in rank order of the classes.

        Sends 4 bytes of each class to every rank, and 6 of each entry to the rank that has its class, some lists at a
        time.
        """
        shapes = link.exchange([table.first, table.num_lists])
        most = max(1, _STRIP // table.k)
        strips = [
            _exchange_strip(table, start, most, shapes, link) for start in range(0, max(num for _, num in shapes), most)
        ]
        lengths, neighbours, ranks = (
            torch.cat([strip[kind][rank] for rank in range(link.world_size) for strip in strips]) for kind in range(3)
        )
        # One entry at least, so that an ignored place can be read.
        filled = [part if len(part) else part.new_zeros(1) for part in (neighbours, ranks)]
        return OwnNeighbours(
            offsets=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)),
            neighbours=filled[0],
            ranks=filled[1],
            longest=int(lengths.max()),
            k=table.k,
            first=table.first,
            stop=table.first + table.num_lists,
            link=link,
        )

    def to(self, device: torch.device) -> OwnNeighbours:
        """Return a copy on a device."""
        parts = {name: getattr(self, name).to(device) for name in ("offsets", "neighbours", "ranks")}
        return replace(self, **parts)

    def near(self, labels_B: Tensor, near: float, budget: int, *, may_wait: bool = False) -> SelectedNeighbours:
        """Select the labels and their nearest neighbours, P + round(``near`` · (``budget`` − P)) for P distinct labels.

        ``labels_B``, the same on every rank, may repeat; ``budget`` is at least P. O(M log M) time, 40·M bytes. With
        ``may_wait`` the host reads the beginnings of lists first, and more where those do not suffice.
        """
        labels_B = torch.sort(labels_B).values
        num_labels = min(1, len(labels_B)) + (labels_B[1:] != labels_B[:-1]).sum(dtype=torch.float64)
        wanted = (budget - num_labels).mul_(near).round_().add_(num_labels).int()
        size = (1 + self.k) * len(labels_B)
        depth = min(self.k, 2 * -(-int(wanted - num_labels) // max(1, int(num_labels)))) if may_wait else self.k
        while True:
            ids_M, turns_M = self._first_turns(labels_B, depth, size)
            below = partial(torch.searchsorted, torch.sort(turns_M).values, out_int32=True)
            limit, num = joint_limit(self.link, below, size, wanted, 4 * self.k)
            if depth == self.k or num == wanted:
                return SelectedNeighbours(ids_M.masked_fill_(turns_M >= limit, self.num_classes), num, budget, self)
            depth = min(self.k, 2 * depth + 1)

    def _first_turns(self, labels_B: Tensor, depth: int, size: int) -> tuple[Tensor, Tensor]:
        """Return the rank's classes among ascending labels and the first ``depth`` of their lists, with their first
        turns.

        Turns count the labels, the nearest neighbour of each, the second ones, …, below ``size``; ``_NONE`` marks
        places without a class, or with one that came before.
        """
        longest = min(self.longest, depth)
        said_RB = candidates_here(labels_B, self.offsets, self.neighbours, longest)
        ranks_RB = candidates_here(labels_B, self.offsets, self.ranks, longest)
        ranks_RB[0] = 0  # a label comes before its neighbours
        said_RB[0] *= (labels_B >= self.first) & (labels_B < self.stop)
        if depth < self.k:
            said_RB.masked_fill_(ranks_RB > depth, 0)
        # class · size + turn; the code 0 means none, so that is below 0
        num_labels, size = len(labels_B), max(1, size)
        turns_RB = torch.add(torch.arange(-size, num_labels - size, device=labels_B.device), ranks_RB, alpha=num_labels)
        keys_M = torch.sort(torch.add(turns_RB, said_RB, alpha=size).flatten()).values
        ids_M, is_none_M = keys_M // size, keys_M < 0
        is_none_M[1:] |= ids_M[1:] == ids_M[:-1]
        return ids_M, (keys_M % size).masked_fill_(is_none_M, _NONE)

    def select(self, labels_P: Ids, budget: int, near: float, seed: int, step: int) -> ActiveClasses:
        """Do :meth:`near` on the host, and fill up to ``budget`` with random classes; returns ids of this rank."""
        chosen = self.near(torch.from_numpy(labels_P), near, budget, may_wait=True)
        given = np.sort(chosen.ids_M[chosen.ids_M < self.num_classes].numpy())
        drawn = sample_ids(self.num_classes, budget, seed, step)
        is_fresh = (drawn >= self.first) & (drawn < self.stop)
        is_fresh[is_fresh] = ~is_member(drawn[is_fresh], given)
        limit = int(chosen.limit(torch.from_numpy(is_fresh)))
        ids = np.concatenate([given, drawn[:limit][is_fresh[:limit]]])
        ids.sort()
        return ActiveClasses(budget, ids)


@dataclass(frozen=True, eq=False)
class SelectedNeighbours:
    """Selected labels and neighbours."""

    ids_M: Tensor
    """Classes of this rank, int64, in any order; C means none."""
    num: Tensor
    """Number that all ranks selected, int32 (0-dim)."""
    budget: int
    graph: OwnNeighbours

    def limit(self, is_fresh_N: Tensor) -> Tensor:
        """Return the end of the draws that fill up to ``budget``; ``is_fresh_N`` marks this rank's unselected ones."""
        below = torch.nn.functional.pad(is_fresh_N.cumsum(0, dtype=torch.int32), (1, 0))
        num, left = len(is_fresh_N), self.budget - self.num
        # There are as many draws as the budget, so that enough of them are new.
        limit, _ = joint_limit(
            self.graph.link, lambda ends: below[ends.clamp_(max=num)], num, left, 4 * self.graph.k, are_there=True
        )
        return limit


def _exchange_strip(
    table: NeighbourTable, start: int, most: int, shapes: list[list[int]], link: Communicator
) -> list[tuple[Tensor, ...]]:
    """Exchange ``most`` lists of each rank: lengths, neighbours and their places, by the rank that has the lists.

    ``shapes`` are each rank's first class and number of lists.
    """
    num_lists = [max(0, min(num - start, most)) for _, num in shapes]
    start, stop = (min(end, table.num_lists) for end in (start, start + most))
    lengths = np.diff(table.offsets[start : stop + 1])
    begin, end = int(table.offsets[start]), int(table.offsets[stop])
    entries = table.neighbours[begin:end]
    places = np.arange(begin, end) - np.repeat(table.offsets[start:stop], lengths)
    places = places.astype(np.int16 if table.k < 2**15 else np.int32)
    owners = np.searchsorted(np.array([first for first, _ in shapes[1:]], entries.dtype), entries, side="right")
    order = torch.from_numpy(np.argsort(owners.astype(np.uint16), kind="stable"))
    at = torch.from_numpy(owners * (stop - start) + np.repeat(np.arange(stop - start), lengths))
    lengths_RN = torch.bincount(at, minlength=len(shapes) * (stop - start)).int()
    leaving = np.bincount(owners, minlength=len(shapes)).tolist()
    own_lengths = torch.split(link.all_to_all(lengths_RN, [stop - start] * len(shapes), num_lists), num_lists)
    arriving = [int(part.sum()) for part in own_lengths]
    moved = [link.all_to_all(torch.from_numpy(part)[order], leaving, arriving) for part in (entries, places)]
    return [own_lengths, *(torch.split(part, arriving) for part in moved)]
