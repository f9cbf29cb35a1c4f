"""The nearest classes of a batch's labels in tensor operations: what ``NeighbourTable.select`` chooses, on the device,
before the sampler of ``kernels/sampling.py`` fills up.

Every shape is a function of numbers that the host has (labels, their lists' longest), so that no host waits.

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
from geartrain.bridge.kernels.sampling import candidates_here, nearest_first


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

    def candidates(self, labels_B: Tensor) -> Tensor:
        """The labels, which rise and may repeat, and their neighbours, the nearest of each first: [1 + r, B] of class
        + 1, 0 for none. Of a part every rank asks for the same labels: one all-reduce of 4·B·(1 + k) bytes.
        """
        said_RB = candidates_here(labels_B, self.offsets, self.neighbours, self.longest, self.first)
        # A label and its list are on one rank: the sum is what that one says.
        return said_RB if self.link is None else self.link.start_sum(said_RB).result()


def near_on(labels_B: Tensor, graph: TorchGraph, near: float, budget: int) -> Tensor:
    """The labels and their nearest neighbours, int64 [M], in any order; C stands for none.

    Labels come first, then the neighbours rank by rank, each class once: P + round(``near`` · (``budget`` − P)) of
    them. Labels may repeat; ``budget`` is at least P. O(M log M) time.
    """
    said_RB = graph.candidates(torch.sort(labels_B).values)
    return nearest_first(said_RB, graph.num_classes, near, budget)


def choice_bytes(num_classes: int, budget: int, num_labels: int, longest: int) -> int:
    """About the most that choosing takes: 40·M for candidates of a graph, a bit for each class, and 20·A."""
    return 40 * num_labels * (1 + longest) + num_classes // 8 + 20 * budget
