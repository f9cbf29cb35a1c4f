"""Selection of a step's active classes for rows on ranks: on the host in C++, or on the device in tensor operations.

Both select the same classes. The host is faster for rows in its own memory; on a device the selection needs no result
computed there, so it runs beside it on its own stream, and the host is not waited for.

Legend: B labels of all ranks, C classes, L live ones, A active ones.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.programs.selection import Ranking, Selection
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.specs import Ids
from geartrain.bridge.head.backends.active_rows import DeviceActive, HostActive
from geartrain.bridge.head.backends.memory_plan import MemoryPart, MemoryPlan, in_step
from geartrain.bridge.head.selection.graph_by_neighbour import OwnNeighbours
from geartrain.bridge.head.selection.torch_selection import TorchGraph, choice_bytes, near_on
from geartrain.bridge.kernels.launch import is_capturing
from geartrain.bridge.kernels.sampling import filled_by_sample, room_for
from geartrain.bridge.placements.device_rows import DeviceRows
from geartrain.bridge.rows.transfers import DeviceEvent, upload


class RankSelector:
    """Selects the classes of one head, step after step. Not thread-safe."""

    def __init__(self, table: DeviceRows, select: Selection) -> None:
        self.on_device: bool | None = None
        """Whether to select on the device; None: if the rows are on one that is no CPU."""
        self._table = table
        self._select = select
        self._stream: torch.cuda.Stream | None = None
        self._graph: tuple[NeighbourTable | OwnNeighbours, TorchGraph | OwnNeighbours] | None = None
        """The graph in use, and its copy on the device."""
        self._live: LiveIds | None = None

    @staticmethod
    def memory(plan: MemoryPlan) -> list[MemoryPart]:
        """Return the memory of the graph, unless it is the lists of the rank's classes, and on a device that of the
        selection."""
        if plan.active == plan.num_classes:
            return []
        num, k, on_device = plan.num_classes, plan.neighbours, plan.device.type != "cpu"
        size, formula = 0, ""
        if k and plan.ranks > 1:
            size, formula = OwnNeighbours.bytes_for(num, k, plan.ranks), "6·C·k / R + 8·C"
        elif k and on_device:
            size, formula = NeighbourTable.bytes_for(num, k), "4·C·k + 8·C"
        graph = MemoryPart(
            name="graph of classes, to choose by", holder="rank", bytes=size, standing=True, formula=formula
        )
        if not on_device:
            return [graph]
        size = choice_bytes(num, plan.active, min(num, plan.batch * plan.ranks), k)
        formula = "40·B·R·(1 + k) + C/8 + 20·A"
        return [graph, *in_step("rank", ("choosing of the active classes", size, formula))]

    def choose(
        self, labels_B: Ids | Tensor, live_classes: LiveClasses, step: int
    ) -> tuple[int, HostActive | DeviceActive]:
        """Return the number of active classes on all ranks together, and those of this rank.

        ``labels_B`` are live. On a device, with labels from either side, the host waits only if the labels on the
        device outnumber the active classes.
        """
        table, num_live_classes = self._table, live_classes.num_live_classes
        budget = self._select.budget(num_live_classes)
        if is_capturing(table.device):
            self._require_capturable(labels_B, budget, num_live_classes)
        if isinstance(labels_B, Tensor) and len(labels_B) > budget:
            labels_B = labels_B.cpu().numpy()  # they alone may exceed the budget: the host must know how many
        numbers: Ids | Tensor = labels_B
        if not isinstance(labels_B, Tensor):
            if not (table.device.type != "cpu" if self.on_device is None else self.on_device):
                active = live_classes.select(self._select, labels_B, step)
                return active.num, HostActive.of(active, table.first, table.stop)
            numbers = np.unique(live_classes.numbers(labels_B))
        ranking = self._select.ranking(len(numbers), num_live_classes)
        if ranking is None:
            on_host = labels_B.cpu().numpy() if isinstance(labels_B, Tensor) else labels_B
            active = live_classes.select(self._select, on_host, step)
            here = HostActive.of(active, table.first, table.stop)
            numbers_A = None if here.sorted_ids is None else upload(here.sorted_ids, table.device)
            return active.num, DeviceActive(here.num, numbers_A, table.device)
        budget = max(budget, len(numbers))
        if budget >= num_live_classes and live_classes.are_all:
            return num_live_classes, DeviceActive(table.num_local, None, table.device)
        ids = self._living_ids(live_classes)
        low, high = live_classes.num_below(table.first), live_classes.num_below(table.stop)
        if budget >= num_live_classes:
            return num_live_classes, DeviceActive(high - low, ids.all_L()[low:high] - table.first, table.device)
        # Labels on a device are computed there by earlier operations.
        is_apart = not isinstance(numbers, Tensor)
        with self._apart() if is_apart else contextlib.nullcontext():
            given = upload(numbers, table.device) if is_apart else ids.numbers(upload(numbers, table.device))
            most, graph, limit = len(given), self._on_device(ranking), None
            if graph is not None:
                most = min(budget, most + math.ceil(ranking.near * budget))
            if isinstance(graph, OwnNeighbours):
                chosen = graph.near(given, ranking.near, budget)
                given, limit = chosen.ids_M, chosen.limit
            elif graph is not None:
                given = near_on(given, graph, ranking.near, budget)
            room = room_for(most, budget, num_live_classes, high - low)
            # A stream does not know when another one has read memory that it overwrites.
            at: Any = step if is_apart else table.step.on(step, table.device)
            sample = filled_by_sample(
                given, num_live_classes, budget, ranking.seed, at, start=low, stop=high, room=room, limit=limit
            )
            rows_A = sample.ids_A if live_classes.are_all else ids.of(sample.ids_A + low) - table.first
        if is_apart and self._stream is not None:
            for tensor in (rows_A, sample.num):
                tensor.record_stream(torch.cuda.current_stream(table.device))
        count = None if high - low == num_live_classes else sample.num
        return budget, DeviceActive(room, rows_A, table.device, count)

    def _require_capturable(self, labels_B: Ids | Tensor, budget: int, num_live_classes: int) -> None:
        """Raise InvalidArgument unless the selection is the same work in each step, whatever the labels."""
        if len(labels_B) > budget or self._select.ranking(len(labels_B), num_live_classes) is None:
            raise InvalidArgument(
                f"{self._select!r} chooses {budget} classes for {len(labels_B)} labels on the host, which no CUDA "
                "graph can; capture steps of FullSoftmax() or PartialFC(sample_rate), with at least as many active "
                "classes as labels"
            )

    def _on_device(self, ranking: Ranking) -> TorchGraph | OwnNeighbours | None:
        graph: NeighbourTable | OwnNeighbours | None = ranking.neighbours
        if graph is None:
            return None
        kept = self._graph
        device = self._table.device
        if kept is None or kept[0] is not graph or kept[1].offsets.device != device:
            self._graph = None  # two at a time would take twice its memory
            on_device = graph.to(device) if isinstance(graph, OwnNeighbours) else TorchGraph.of(graph, device)
            self._graph = kept = (graph, on_device)
        return kept[1]

    def _living_ids(self, live_classes: LiveClasses) -> LiveIds:
        kept = self._live
        if kept is None or kept.live_classes is not live_classes or kept.device != self._table.device:
            self._live = kept = LiveIds(live_classes, self._table.device)
        return kept

    @contextlib.contextmanager
    def _apart(self) -> Iterator[None]:
        """Work on a stream of its own beside the device's computation; later computation waits for it there."""
        device = self._table.device
        if device.type != "cuda":
            yield
            return
        if self._stream is None or self._stream.device != device:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream(device).wait_stream(self._stream)


class LiveIds:
    """Ids of live classes, on a device."""

    def __init__(self, live_classes: LiveClasses, device: torch.device) -> None:
        self.live_classes, self.device = live_classes, device
        self._jumps, self._before = upload(live_classes.jumps, device), upload(live_classes.retired_before, device)
        self._starts = upload(np.ascontiguousarray(live_classes.retired_runs[:, 0]), device)
        if not live_classes.are_all:
            DeviceEvent(device).wait()  # once for these classes: a stream other than that of the copies reads them, too
        self._all_L: Tensor | None = None

    def of(self, numbers: Tensor) -> Tensor:
        if self.live_classes.are_all:
            return numbers
        return numbers + self._before[torch.searchsorted(self._jumps, numbers, right=True)]

    def numbers(self, ids: Tensor) -> Tensor:
        """Return the result of :meth:`LiveClasses.numbers`, for ids on a device."""
        if self.live_classes.are_all:
            return ids
        return ids - self._before[torch.searchsorted(self._starts, ids, right=True)]

    def all_L(self) -> Tensor:
        """Return the ids of all live classes; cached, 8·L bytes."""
        if self._all_L is None:
            self._all_L = upload(self.live_classes.all_ids, self.device)
        return self._all_L
