"""The nearest classes of a batch's labels in tensor operations: what ``NeighbourTable.select`` chooses, on the device,
before the sampler of ``kernels/sampling.py`` fills up.

Every shape is a function of numbers that the host has (labels, their lists' longest), so that no host waits: candidates
in the order of the specification — labels, then their neighbours rank by rank — are sorted by class, the first of each
class counts, and of these the earliest are chosen.

Legend: C classes, L of them with lists here, E entries of their lists, B labels, P distinct ones, r the longest list, A
active classes, M = B·(1 + r) candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.bridge.collectives.communicator import Communicator


@dataclass(frozen=True, eq=False)
class TorchGraph:
    """A :class:`NeighbourTable` on a device, or this rank's part of one: 4·E + 8·L bytes there."""

    offsets: Tensor
    """int64 [L + 1]."""
    neighbours: Tensor
    """int32 or int64 [E]."""
    longest: int
    """Entries of the longest list; of a part: k, the same on every rank."""
    first: int
    """Class of the first list."""
    num_classes: int
    """C."""
    link: Communicator | None
    """The ranks that have the other parts; None: it is whole."""

    @staticmethod
    def of(table: NeighbourTable, device: torch.device, link: Communicator | None = None) -> TorchGraph:
        """Copy it there, and wait for that: pinned memory of its size would stay pinned. ``link`` is asked where it is
        a part."""
        is_part = table.total is not None
        longest = table.k if is_part else int(np.diff(table.offsets).max())
        # One entry at least, so that a place may be read that is then not taken.
        filled = table.neighbours if len(table.neighbours) else np.zeros(1, table.neighbours.dtype)
        offsets, neighbours = (torch.from_numpy(part).to(device) for part in (table.offsets, filled))
        return TorchGraph(offsets, neighbours, longest, table.first, table.num_classes, link if is_part else None)

    def by_rank(self, labels_P: Tensor) -> Tensor:
        """Neighbours [r·P] of the labels: the first of each, then the second of each, …; C where a list has ended.

        A label of C stands for none. Of a part every rank asks for the same labels: one all-reduce of 4·P·k bytes.
        """
        at_P = labels_P - self.first
        here_P = (at_P >= 0) & (at_P < len(self.offsets) - 1)
        at_P = torch.where(here_P, at_P, 0)
        ends_P = torch.where(here_P, self.offsets[(at_P + 1).clamp(max=len(self.offsets) - 1)], 0)
        places_RP = self.offsets[at_P] + torch.arange(self.longest, device=labels_P.device).unsqueeze(1)
        found_RP = self.neighbours[places_RP.clamp(max=len(self.neighbours) - 1)]
        if self.link is None:
            return torch.where(places_RP < ends_P, found_RP.long(), self.num_classes).flatten()
        # The lists of a label are on one rank: the sum is what that one says.
        said_RP = self.link.sum(torch.where(places_RP < ends_P, found_RP + 1, 0)).long()
        return torch.where(said_RP > 0, said_RP - 1, self.num_classes).flatten()


def near_on(labels_B: Tensor, graph: TorchGraph, near: float, budget: int) -> Tensor:
    """The labels and their nearest neighbours, int64 [M], in any order; C stands for none.

    Labels come first, then the neighbours rank by rank, each class once: P + round(``near`` · (``budget`` − P)) of
    them. Labels may repeat; ``budget`` is at least P. O(M log M) time.
    """
    labels_B = torch.sort(labels_B).values
    is_new_B = torch.ones_like(labels_B, dtype=torch.bool)
    is_new_B[1:] = labels_B[1:] != labels_B[:-1]
    num_labels = is_new_B.sum()
    num_near = num_labels + torch.round((budget - num_labels).double() * near).long()
    labels_B = torch.where(is_new_B, labels_B, graph.num_classes)
    candidates_M = torch.cat([labels_B, graph.by_rank(labels_B)]) if graph.longest and len(labels_B) else labels_B
    ids_M, order_M = torch.sort(candidates_M, stable=True)
    is_first_M = ids_M < graph.num_classes
    is_first_M[1:] &= ids_M[1:] != ids_M[:-1]
    in_turn_M = torch.empty_like(is_first_M).scatter_(0, order_M, is_first_M)
    return torch.where(in_turn_M & (in_turn_M.cumsum(0) <= num_near), candidates_M, graph.num_classes)


def choice_bytes(num_classes: int, budget: int, num_labels: int, longest: int) -> int:
    """About the most that choosing takes: 40·M for candidates of a graph, a bit for each class, and 20·A."""
    return 40 * num_labels * (1 + longest) + num_classes // 8 + 20 * budget
