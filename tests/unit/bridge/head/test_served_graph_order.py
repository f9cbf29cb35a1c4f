"""A head that gives up a build of its graph service and wants another one at once gets that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.values.errors import Cancelled, InvalidArgument
from geartrain.ams.values.graph_messages import GraphBuilding
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import TableSpec
from geartrain.bridge.head.selection.knn_selection import KNNSelection, KNNSoftmax
from geartrain.bridge.head.selection.served_graph import TableGraphs
from tests.support.plain_graph import table_of

CLASSES = 20


class BusyService:
    """Builds one graph at a time, refuses another one meanwhile, and builds until it is told not to if ``is_slow``."""

    def __init__(self) -> None:
        self.is_slow, self.steps = False, list[int]()
        self.has_begun = threading.Event()
        self._busy = threading.Lock()

    def build(
        self, table: str, k: int, *, step: int, progress: Callable[[GraphBuilding], None], cancelled: Callable[[], bool]
    ) -> None:
        if not self._busy.acquire(blocking=False):
            raise InvalidArgument(f"the graph of {table!r} is being built of another step")
        try:
            self.steps.append(step)
            self.has_begun.set()
            while self.is_slow:
                progress(GraphBuilding(table=table, k=k, step=step, done_pairs=1, total_pairs=2, seconds=0.0))
                threading.Event().wait(0.05)  # so often does it tell
                if cancelled():
                    self.is_slow = False
                    raise Cancelled("as asked")
        finally:
            self._busy.release()

    def load(self, _: str) -> tuple[NeighbourTable, Any]:
        lists = [[(item + 1) % CLASSES] for item in range(CLASSES)]
        return table_of(lists, 2), SimpleNamespace(k=2, num_classes=CLASSES, table_incarnation=0)


@pytest.mark.parametrize("beside", [False, True])
def test_the_next_build_waits_until_the_service_knows_that_the_last_one_is_cancelled(beside: bool) -> None:
    service, step = BusyService(), 0
    spec = TableSpec(name="faces", dim=4, optimizer=SGD(0.1), num_rows=CLASSES)
    settings = KNNSoftmax(active=0.2, k=2, rebuild="background")
    table: Any = SimpleNamespace(spec=spec)
    select = KNNSelection(settings, table, None, lambda: step, TableGraphs(table, service))  # type: ignore[arg-type]
    select.prepare()
    service.is_slow = True
    service.has_begun.clear()
    select.next_epoch()
    step = 1
    select.prepare()
    assert service.has_begun.wait(30)
    step = 2
    if beside:
        select.cancel()
        select.prepare()
        assert select._pending is not None
        select._pending.result.result(30)
        step = 3
        select.prepare()
    else:
        select.rebuild_graph()
    assert service.steps == [0, 1, 2]
    assert select.graph is not None and (select.graph.step, select.graph.version) == (2, 2)
