"""A graph of nearest classes cut by neighbour: of every class's list a rank keeps the neighbours whose rows it has
(100-million-class paper, section 3.2.3), and so finds its active classes without the lists of others.

What all ranks choose is what the whole graph chooses: the labels, the nearest neighbour of each, the second ones, …, up
to a number of classes. A class lies on one rank, which alone finds out where it comes first; only where to cut is found
together, by counts (``joint_limit.py``): 8·k bytes a step at most, for neighbours and random classes together.

Legend: C classes, E entries of lists on this rank, B labels of all ranks, k neighbours of a class, r the longest list
here, A active classes, M = (1 + r)·B candidates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.kernels.ops import sample_ids
from geartrain.ams.programs.selection import ActiveClasses
from geartrain.ams.values.specs import Ids
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.collectives.joint_limit import joint_limit
from geartrain.bridge.kernels.sampling import candidates_here

_STRIP = 1 << 16
"""Lists that are cut at a time."""
_NO_CLASS = torch.iinfo(torch.int64).max


@dataclass(frozen=True, eq=False, kw_only=True)
class OwnNeighbours:
    """Lists of all classes, shortened to the classes of one rank (CSR): 8·C + 6·E bytes, E = C·k / R on average."""

    offsets: Tensor
    """int64 [C + 1]."""
    neighbours: Tensor
    """int32 or int64 [E], E >= 1."""
    ranks: Tensor
    """int16 or int32 [E]: place of each neighbour in the whole list, from 0 on."""
    longest: int
    """Entries of the longest list here."""
    k: int
    first: int
    stop: int
    """The classes of this rank are ``first`` … ``stop`` − 1."""
    link: Communicator

    @property
    def num_classes(self) -> int:
        """C."""
        return len(self.offsets) - 1

    @staticmethod
    def bytes_for(num_classes: int, k: int, num_ranks: int) -> int:
        """Of one rank, on average."""
        return 8 * (num_classes + 1) + 6 * -(-num_classes * min(k, num_classes - 1) // num_ranks)

    @staticmethod
    def of(table: NeighbourTable, link: Communicator) -> OwnNeighbours:
        """Cut the graph of which ``table`` is this rank's part; every rank calls it, in rank order of the classes.

        Sends 4 bytes of each class to every rank, and 6 of each entry to the rank that has its class, some lists at a
        time.
        """
        shapes = link.exchange([table.first, table.num_lists])
        strips = [_exchange_strip(table, start, shapes, link) for start in range(0, max(n for _, n in shapes), _STRIP)]
        lengths, neighbours, ranks = (
            torch.cat([strip[kind][rank] for rank in range(link.world_size) for strip in strips]) for kind in range(3)
        )
        # One entry at least, so that a place may be read that is then not taken.
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
        """The same on a device."""
        parts = {name: getattr(self, name).to(device) for name in ("offsets", "neighbours", "ranks")}
        return replace(self, **parts)

    def near(self, labels_B: Tensor, near: float, budget: int) -> NearHere:
        """Choose the labels and their nearest neighbours, P + round(``near`` · (``budget`` − P)) for P distinct labels.

        ``labels_B``, the same on every rank, may repeat; ``budget`` is at least P. O(M log M) time, 40·M bytes.
        """
        labels_B = torch.sort(labels_B).values
        said_RB = candidates_here(labels_B, self.offsets, self.neighbours, self.longest)
        ranks_RB = candidates_here(labels_B, self.offsets, self.ranks, self.longest).long()
        ranks_RB[0] = 0  # a label comes before its neighbours
        num_labels = (said_RB[0] > 0).sum()
        said_RB[0] *= (labels_B >= self.first) & (labels_B < self.stop)
        size = (1 + self.k) * len(labels_B)
        turns_RB = ranks_RB * len(labels_B) + torch.arange(len(labels_B), device=labels_B.device)
        keys_RB = torch.where(said_RB > 0, (said_RB.long() - 1) * size + turns_RB, _NO_CLASS)
        keys_M = torch.sort(keys_RB.flatten()).values
        ids_M = keys_M // size
        is_first_M = keys_M != _NO_CLASS
        is_first_M[1:] &= ids_M[1:] != ids_M[:-1]
        turns_M = torch.where(is_first_M, keys_M % size, size)
        sorted_M = torch.sort(turns_M).values
        wanted = num_labels + torch.round((budget - num_labels).double() * near).long()
        limit, num = joint_limit(
            self.link, lambda ends: torch.searchsorted(sorted_M, ends.clamp(max=size)), size, wanted, 4 * self.k
        )
        return NearHere(torch.where(turns_M < limit, ids_M, self.num_classes), num, budget, self)

    def select(self, labels_P: Ids, budget: int, near: float, seed: int, step: int) -> ActiveClasses:
        """On the host: :meth:`near`, filled up to ``budget`` with random classes; the ids are those of this rank."""
        chosen = self.near(torch.from_numpy(labels_P), near, budget)
        given = np.sort(chosen.ids_M[chosen.ids_M < self.num_classes].numpy())
        drawn = sample_ids(self.num_classes, budget, seed, step)
        is_fresh = (drawn >= self.first) & (drawn < self.stop)
        is_fresh[is_fresh] = ~np.isin(drawn[is_fresh], given)
        limit = int(chosen.limit(torch.from_numpy(is_fresh)))
        ids = np.concatenate([given, drawn[:limit][is_fresh[:limit]]])
        ids.sort()
        return ActiveClasses(budget, ids)


@dataclass(frozen=True, eq=False)
class NearHere:
    """The labels and neighbours that were chosen."""

    ids_M: Tensor
    """int64: those of this rank, in any order; C stands for none."""
    num: Tensor
    """int64 (0-dim): how many all ranks chose."""
    budget: int
    graph: OwnNeighbours

    def limit(self, is_fresh_N: Tensor) -> Tensor:
        """Draws below it fill up to ``budget``; ``is_fresh_N`` tells which ones are of this rank and not chosen."""
        below = torch.nn.functional.pad(is_fresh_N.cumsum(0), (1, 0))
        num = len(is_fresh_N)
        limit, _ = joint_limit(
            self.graph.link, lambda ends: below[ends.clamp(max=num)], num, self.budget - self.num, 4 * self.graph.k
        )
        return limit


def _exchange_strip(
    table: NeighbourTable, start: int, shapes: list[list[int]], link: Communicator
) -> list[tuple[Tensor, ...]]:
    """Lengths, neighbours and their places, each by the rank whose lists they are of; ``shapes`` are its first class
    and number of lists."""
    num_lists = [max(0, min(num - start, _STRIP)) for _, num in shapes]
    start, stop = (min(end, table.num_lists) for end in (start, start + _STRIP))
    lengths = np.diff(table.offsets[start : stop + 1])
    begin, end = int(table.offsets[start]), int(table.offsets[stop])
    entries = torch.from_numpy(table.neighbours[begin:end])
    places = torch.from_numpy(np.arange(begin, end) - np.repeat(table.offsets[start:stop], lengths))
    firsts = torch.tensor([first for first, _ in shapes])
    owners, order = torch.sort(torch.searchsorted(firsts, entries.long(), right=True) - 1, stable=True)
    lists = torch.from_numpy(np.repeat(np.arange(stop - start), lengths))[order]
    lengths_RN = torch.bincount(owners * (stop - start) + lists, minlength=len(shapes) * (stop - start)).int()
    own_lengths = torch.split(link.all_to_all(lengths_RN, [stop - start] * len(shapes), num_lists), num_lists)
    leaving = torch.bincount(owners, minlength=len(shapes)).tolist()
    arriving = [int(part.sum()) for part in own_lengths]
    moved = [
        link.all_to_all(part[order], leaving, arriving)
        for part in (entries, places.to(torch.int16 if table.k < 2**15 else torch.int32))
    ]
    return [own_lengths, *(torch.split(part, arriving) for part in moved)]
