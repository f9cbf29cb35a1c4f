"""Graphs of class rows that lie on ranks: each rank freezes its own rows, and the ring builds the graph of them.

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
from geartrain.bridge.head.selection.graph_parts import GraphParts
from geartrain.bridge.placements.device_rows import DeviceRows

OnPairs = Callable[[int, int], None]


class RankGraphs:
    """Builds one graph after the other, on threads or not; ranks speak of it on a process group of its own."""

    def __init__(self, table: DeviceRows) -> None:
        """Every rank makes it: a new process group."""
        self.table = table
        self.link = table.link.apart()
        self.parts = GraphParts(table.link, table.first, table.stop) if table.link.world_size > 1 else None
        self.lock = threading.Lock()

    def rows(self, live_classes: LiveClasses, step: int, *, beside_training: bool = False) -> FrozenRows:
        del step
        return self.freeze(None if live_classes.are_all else live_classes.all_ids, beside_training=beside_training)

    def freeze(self, ids: Ids | None = None, *, beside_training: bool = False) -> FrozenRows:
        """The rows as they are now: 4·L·D bytes of the host, 2·L·D more if they have 16 bits. Waits for the device.

        ``ids`` (None: all), rising and the same on every rank, are the classes that the graph is of; it names them by
        their places in ``ids``.
        """
        table = self.table
        rows_LD = table.current_rows(slice(None) if ids is None else table.local(ids)[1]).detach().cpu()
        raw_LD = None if rows_LD.dtype == torch.float32 else rows_LD
        rows = np.array(rows_LD.float().numpy(), dtype=np.float32, order="C")
        # Two NCCL groups at work at once might wait for each other: a thread beside the training uses gloo.
        return FrozenRows(self, rows, raw_LD, self.link if beside_training else table.link)


class FrozenRows:
    """This rank's rows of one moment; used up by :meth:`build`."""

    one_at_a_time = False

    def __init__(
        self, graphs: RankGraphs, rows_LD: npt.NDArray[np.float32], raw_LD: Tensor | None, carrier: Communicator
    ) -> None:
        self._graphs, self._rows_LD, self._raw_LD, self._carrier = graphs, rows_LD, raw_LD, carrier

    def build(self, k: int, progress: OnPairs | None, cancelled: Callable[[], bool]) -> NeighbourTable:
        """This rank's lists of the graph of all ranks' rows; recalled on their device. A cancelled one ends first."""
        # Only a head that selects by a graph loads the builder.
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
