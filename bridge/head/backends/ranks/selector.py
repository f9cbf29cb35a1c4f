"""How rows on ranks choose the active classes of a step: on the host in C++, or on their device in tensor operations.

Both choose the same. The host is faster where the rows are its own; on a device the choice needs nothing of what is
computed there, so it runs beside it on a stream of its own, and nobody waits for the host to choose.

Legend: B labels of all ranks, C classes, L living ones, A active ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.programs.selection import Ranking, Selection
from geartrain.ams.values.specs import Ids
from geartrain.bridge.head.backends.active_rows import DeviceActive, HostActive
from geartrain.bridge.head.memory_plan import MemoryPart, MemoryPlan, in_step
from geartrain.bridge.head.selection.torch_selection import TorchGraph, choice_bytes, select_on
from geartrain.bridge.placements.device_rows import DeviceRows
from geartrain.bridge.rows.transfers import upload


class RankSelector:
    """Chooses the classes of one head, step after step. Not thread-safe."""

    def __init__(self, table: DeviceRows, select: Selection) -> None:
        self.on_device: bool | None = None
        """Where to choose; None: on the device if the rows are on one that is no CPU."""
        self._table = table
        self._select = select
        self._stream: torch.cuda.Stream | None = None
        self._graph: tuple[NeighbourTable, TorchGraph] | None = None
        """The one in use, and its copy on the device."""
        self._living: LivingIds | None = None

    @staticmethod
    def memory(plan: MemoryPlan) -> list[MemoryPart]:
        """What choosing takes on a device: the graph once more, and candidates."""
        if plan.device.type == "cpu" or plan.active == plan.num_classes:
            return []
        num, k = plan.num_classes, plan.neighbours
        graph = MemoryPart(
            name="graph of classes, on the device",
            holder="rank",
            bytes=NeighbourTable.bytes_for(num, k, plan.ranks) if k else 0,
            standing=True,
            formula="(4·C·k + 8·C) / R",
        )
        size = choice_bytes(num, plan.active, min(num, plan.batch * plan.ranks), k)
        formula = "40·(B·R·(1 + k) + A) + 75·(A + O)"
        return [graph, *in_step("rank", ("choosing of the active classes", size, formula))]

    def choose(
        self, labels_B: Ids | Tensor, live_classes: LiveClasses, step: int
    ) -> tuple[int, HostActive | DeviceActive]:
        """How many classes are active on all ranks together, and which of them are this rank's.

        ``labels_B`` live. On a device with several ranks the host waits for two numbers, and for nothing else there.
        """
        table = self._table
        if isinstance(labels_B, Tensor):
            num = live_classes.num_living
            if live_classes.are_all and self._select.ranking(0, num) and self._select.budget(num) >= num:
                return num, DeviceActive(table.num_local, None, table.device)
            labels_B = labels_B.cpu().numpy()
        if not (table.device.type != "cpu" if self.on_device is None else self.on_device):
            active = live_classes.select(self._select, labels_B, step)
            return active.num, HostActive.of(active, table.first, table.stop)
        labels_P = np.unique(live_classes.numbers(labels_B))
        ranking = self._select.ranking(len(labels_P), live_classes.num_living)
        if ranking is None:
            active = live_classes.select(self._select, labels_B, step)
            here = HostActive.of(active, table.first, table.stop)
            numbers_A = None if here.sorted_ids is None else upload(here.sorted_ids, table.device)
            return active.num, DeviceActive(here.num, numbers_A, table.device)
        budget = max(self._select.budget(live_classes.num_living), len(labels_P))
        if budget >= live_classes.num_living and live_classes.are_all:
            return live_classes.num_classes, DeviceActive(table.num_local, None, table.device)
        with self._apart():
            ids = self._living_ids(live_classes)
            if budget >= live_classes.num_living:
                active_A = ids.all_L()
            else:
                chosen_A, lists = upload(labels_P, table.device), self._on_device(ranking)
                for places in dict.fromkeys((ranking.num_near or budget, budget)):
                    chosen_A = select_on(chosen_A, lists, live_classes.num_living, places, seed=ranking.seed, step=step)
                    lists = None
                active_A = ids.of(chosen_A)
            here_A = self._here(active_A)
        if self._stream is not None and here_A.numbers_A is not None:
            here_A.numbers_A.record_stream(torch.cuda.current_stream(table.device))
        return len(active_A), here_A

    def _here(self, active_A: Tensor) -> DeviceActive:
        """Those of them that this rank has. The one wait: for how many they are, unless they must be all."""
        table = self._table
        if table.link.world_size == 1:
            return DeviceActive(len(active_A), active_A, table.device)
        bounds = upload(np.array([table.first, table.stop]), table.device)
        low, high = torch.searchsorted(active_A, bounds).tolist()
        return DeviceActive(high - low, active_A[low:high] - table.first, table.device)

    def _on_device(self, ranking: Ranking) -> TorchGraph | None:
        graph: NeighbourTable | None = ranking.neighbours
        if graph is None:
            return None
        kept = self._graph
        if kept is None or kept[0] is not graph or kept[1].offsets.device != self._table.device:
            self._graph = None  # two at a time would be twice its memory
            self._graph = kept = (graph, TorchGraph.of(graph, self._table.device, self._table.link))
        return kept[1]

    def _living_ids(self, live_classes: LiveClasses) -> LivingIds:
        kept = self._living
        if kept is None or kept.live_classes is not live_classes or kept.device != self._table.device:
            self._living = kept = LivingIds(live_classes, self._table.device)
        return kept

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Work on a stream beside what the device computes; what is computed after it waits for it there."""
        device = self._table.device
        if device.type != "cuda":
            yield
            return
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(device).wait_stream(self._stream)


class LivingIds:
    """The ids of living classes, on a device."""

    def __init__(self, live_classes: LiveClasses, device: torch.device) -> None:
        self.live_classes, self.device = live_classes, device
        self._jumps, self._before = upload(live_classes.jumps, device), upload(live_classes.retired_before, device)
        self._all_L: Tensor | None = None

    def of(self, numbers: Tensor) -> Tensor:
        if self.live_classes.are_all:
            return numbers
        return numbers + self._before[torch.searchsorted(self._jumps, numbers, right=True)]

    def all_L(self) -> Tensor:
        """Of all of them; kept, 8·L bytes."""
        if self._all_L is None:
            self._all_L = upload(self.live_classes.all_ids, self.device)
        return self._all_L
