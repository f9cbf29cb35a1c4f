"""The time that a training waits for rows: two numbers of the live line. Pushes are counted where they are made.

With hosted rows a pull is the time in which the shards compute.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from geartrain.ams.client.hosted_calls import InputsOfShard
from geartrain.ams.values.scheduler_messages import ClusterView
from geartrain.ams.values.shard_messages import Arrays, Done, SyncGroup
from geartrain.ams.values.specs import DTypeName, Ids, TableSpec
from geartrain.bridge.rows.tables import HeadCalls, HeadCluster, HeadTable, HeadWrite, TableWrite


@dataclass
class RowTimes:
    """Seconds spent waiting for rows, since the beginning."""

    pull_seconds: float = 0.0
    push_seconds: float = 0.0

    @contextmanager
    def pulling(self) -> Iterator[None]:
        """Count what happens inside as a pull."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.pull_seconds += time.perf_counter() - started

    @contextmanager
    def pushing(self) -> Iterator[None]:
        """Count what happens inside as a push."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.push_seconds += time.perf_counter() - started


class TimedCluster:
    """Passes everything on to ``cluster``; its tables are :class:`TimedTable`."""

    def __init__(self, cluster: HeadCluster) -> None:
        self._cluster = cluster
        self.times = RowTimes()

    @property
    def graph_service(self) -> Any:
        """See ``Cluster.graph_service``."""
        return getattr(self._cluster, "graph_service", None)

    def create_table(self, name: str, **settings: Any) -> TimedTable:
        """See ``Cluster.create_table``."""
        return TimedTable(self._cluster.create_table(name, **settings), self.times)


class TimedTable:
    """The table of a head, with a stop-watch around what its caller waits for."""

    def __init__(self, table: HeadTable, times: RowTimes) -> None:
        self._table = table
        self._times = times

    @property
    def spec(self) -> TableSpec:
        """See ``Table.spec``."""
        return self._table.spec

    def pull_into(self, ids: Ids, out: npt.NDArray[Any], *, required_sync: SyncGroup | None = None) -> None:
        """See ``Table.pull_into``."""
        with self._times.pulling():
            self._table.pull_into(ids, out, required_sync=required_sync)

    def pull_into_async(
        self, ids: Ids, out: npt.NDArray[Any], *, required_sync: SyncGroup | None = None
    ) -> Future[None]:
        """See ``Table.pull_into_async``. Not counted: these pulls run while the head computes."""
        return self._table.pull_into_async(ids, out, required_sync=required_sync)

    def prepare_push(self, ids: Ids, gradients: npt.NDArray[Any], **settings: Any) -> TableWrite:
        """See ``Table.prepare_push``."""
        return self._table.prepare_push(ids, gradients, **settings)

    def assign(self, ids: Ids, rows: npt.NDArray[Any]) -> Done:
        """See ``Table.assign``."""
        return self._table.assign(ids, rows)

    def with_wire(self, wire_dtype: DTypeName | None) -> TimedTable:
        """See ``Table.with_wire``."""
        return TimedTable(self._table.with_wire(wire_dtype), self._times)

    def hosted(self, model: str) -> _TimedCalls:
        """See ``Table.hosted``."""
        return _TimedCalls(self._table.hosted(model), self._times)


class _TimedCalls:
    def __init__(self, calls: HeadCalls, times: RowTimes) -> None:
        self._calls = calls
        self._times = times

    @property
    def part_bytes(self) -> int:
        return self._calls.part_bytes

    @property
    def view(self) -> ClusterView:
        return self._calls.view

    def compute(self, operation: str, inputs: InputsOfShard, *, required_sync: SyncGroup | None = None) -> list[Arrays]:
        with self._times.pulling():
            return self._calls.compute(operation, inputs, required_sync=required_sync)

    def prepare_update(self, inputs: InputsOfShard, **settings: Any) -> HeadWrite:
        return self._calls.prepare_update(inputs, **settings)
