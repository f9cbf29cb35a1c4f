"""The active classes of a batch in tensor operations: what ``NeighbourTable.select`` chooses, on the device.

Every shape is a function of numbers that the host has (labels, their lists' longest, budget), so that no host waits:
candidates in the order of the specification — labels, then their neighbours rank by rank, then the sample — are sorted
by class, the first of each class counts, and of these the earliest ``budget`` are chosen.

Legend: C classes, L of them with lists here, E entries of their lists, P distinct labels, r the longest list, A active
classes, M = P·(1 + r) + A candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.head.selection.torch_sampling import sample_ids_on


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


def select_on(
    labels_P: Tensor, graph: TorchGraph | None, num_classes: int, budget: int, *, seed: int, step: int
) -> Tensor:
    """The active classes, int64 [A] rising, of which every rank and every device finds the same.

    ``labels_P`` are distinct and rise; ``budget`` (A) is at least P and below C. Without a graph the sample alone fills
    up: what :class:`PartialFC` chooses. O(M log M) time; memory meanwhile: :func:`choice_bytes`.
    """
    candidates = [labels_P]
    if graph is not None and graph.longest and len(labels_P):
        candidates.append(graph.by_rank(labels_P))
    # At most as many of the first A sampled ones are chosen already as need no filling.
    candidates.append(sample_ids_on(labels_P.device, num_classes, budget, seed, step))
    ids_M, order_M = torch.sort(torch.cat(candidates), stable=True)
    is_first_M = ids_M < num_classes
    is_first_M[1:] &= ids_M[1:] != ids_M[:-1]
    in_turn_M = torch.empty_like(is_first_M).scatter_(0, order_M, is_first_M)
    chosen_M = (in_turn_M & (in_turn_M.cumsum(0) <= budget))[order_M]
    # What is not chosen goes to a place behind the others.
    places_M = torch.where(chosen_M, chosen_M.cumsum(0) - 1, budget)
    return ids_M.new_empty(budget + 1).scatter_(0, places_M, ids_M)[:budget]


def choice_bytes(num_classes: int, budget: int, num_labels: int, longest: int) -> int:
    """About the most that :func:`select_on` takes: 40·M for the candidates and 75·(A + O) for the sample, O < C
    being what C lacks to a power of two. Measured on a CPU: 0.6 to 1.0 of it.
    """
    candidates = num_labels * (1 + longest) + budget
    outside = (1 << (num_classes - 1).bit_length()) - num_classes
    return 40 * candidates + 75 * (budget + outside)
