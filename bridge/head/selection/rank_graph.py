"""Graphs of class rows on ranks: each rank copies its own rows, of which the ring builds the graph.

Legend: L rows on this rank, D width.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.values.specs import Ids
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.head.selection.graph_by_list import GraphParts
from geartrain.bridge.placements.device_rows import DeviceRows

OnPairs = Callable[[int, int], None]


class RankGraphs:
    """Builder of graphs, one at a time, on a thread or not; the ranks use a process group of its own."""

    def __init__(self, table: DeviceRows) -> None:
        """Create the process group; collective."""
        self.table = table
        self.link = table.link.apart()
        self.parts = GraphParts(table.link, table.first, table.stop) if table.link.world_size > 1 else None
        self.lock = threading.Lock()

    def rows(self, live_classes: LiveClasses, step: int, *, beside_training: bool = False) -> FrozenRows:
        del step
        return self.freeze(None if live_classes.are_all else live_classes.all_ids, beside_training=beside_training)

    def freeze(self, ids: Ids | None = None, *, beside_training: bool = False) -> FrozenRows:
        """Copy the current rows: 4·L·D bytes of the host, 2·L·D more if they have 16 bits. Waits for the device.

        ``ids`` (None: all), ascending and the same on every rank, are the graph's classes; the graph numbers
        them by their places in ``ids``.
        """
        table = self.table
        rows_LD = table.current_rows(slice(None) if ids is None else table.local(ids)[1]).detach().cpu()
        raw_LD = None if rows_LD.dtype == torch.float32 else rows_LD
        rows = np.array(rows_LD.float().numpy(), dtype=np.float32, order="C")
        # Two NCCL groups in use at once might wait for each other: a background thread uses gloo.
        return FrozenRows(self, rows, raw_LD, self.link if beside_training else table.link)


class FrozenRows:
    """Copy of this rank's rows at one moment; used up by :meth:`build`."""

    one_at_a_time = False

    def __init__(
        self, graphs: RankGraphs, rows_LD: npt.NDArray[np.float32], raw_LD: Tensor | None, carrier: Communicator
    ) -> None:
        self._graphs, self._rows_LD, self._raw_LD, self._carrier = graphs, rows_LD, raw_LD, carrier

    def build(self, k: int, progress: OnPairs | None, cancelled: Callable[[], bool]) -> NeighbourTable:
        """Return this rank's lists of the graph of all ranks' rows; recall is on their device. Waits for a cancelled
        build."""
        # Import here: only heads that select by a graph need the builder.
        from geartrain.bridge.head.selection.graph_products import TorchProducts
        from geartrain.bridge.head.selection.rank_ring import build_on_ring

        graphs, device = self._graphs, self._graphs.table.device
        products = None if device.type == "cpu" else TorchProducts(device)
        with graphs.lock:
            return build_on_ring(
                graphs.link,
                self._rows_LD,
                k,
                products=products,
                raw_LD=self._raw_LD,
                carrier=self._carrier,
                progress=progress,
                cancelled=cancelled,
            )
