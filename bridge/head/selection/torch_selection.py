"""Selection of the classes nearest to a batch's labels in tensor operations on the device: the same as
``NeighbourTable.select``, before the sampler of ``kernels/sampling.py`` fills up.

Every shape is a function of numbers that the host knows (labels, longest list), so that no host waits.

Legend: C classes, E entries of their lists, B labels, P distinct ones, r the longest list, A active classes,
M = B·(1 + r) candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.bridge.kernels.sampling import candidates_here, nearest_first


@dataclass(frozen=True, eq=False)
class TorchGraph:
    """Whole :class:`NeighbourTable` on a device: 4·E + 8·C bytes there."""

    offsets: Tensor
    """Starts of the lists, int64 [C + 1]."""
    neighbours: Tensor
    """Neighbours, int32 or int64 [E]."""
    longest: int
    """Number of entries of the longest list."""

    @property
    def num_classes(self) -> int:
        """Number of classes, C."""
        return len(self.offsets) - 1

    @staticmethod
    def of(table: NeighbourTable, device: torch.device) -> TorchGraph:
        """Copy the table to the device, and wait for it: pinned memory of its size would stay pinned."""
        # One entry at least, so that an ignored place can be read.
        filled = table.neighbours if len(table.neighbours) else np.zeros(1, table.neighbours.dtype)
        offsets, neighbours = (torch.from_numpy(part).to(device) for part in (table.offsets, filled))
        return TorchGraph(offsets, neighbours, int(np.diff(table.offsets).max()))


def near_on(labels_B: Tensor, graph: TorchGraph, near: float, budget: int) -> Tensor:
    """Return the labels and their nearest neighbours, int64 [M], in any order; C means none.

    Labels come first, then the neighbours rank by rank, each class once: P + round(``near`` · (``budget`` − P)) of
    them. Labels may repeat; ``budget`` is at least P. O(M log M) time.
    """
    said_RB = candidates_here(torch.sort(labels_B).values, graph.offsets, graph.neighbours, graph.longest)
    return nearest_first(said_RB, graph.num_classes, near, budget)


def choice_bytes(num_classes: int, budget: int, num_labels: int, longest: int) -> int:
    """Return about the most memory of a selection: 40·M for candidates of a graph, a bit for each class, and 20·A."""
    return 40 * num_labels * (1 + longest) + num_classes // 8 + 20 * budget
