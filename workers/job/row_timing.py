"""The time that a training waits for rows: two numbers of the live line. Pushes are counted where they are made.

With hosted rows a pull is the time in which the shards compute.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from geartrain.bridge.rows.tables import HeadCluster


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
    """Passes everything on to ``cluster``, with a stop-watch around what the caller of a head's table waits for.

    Pulls that run while the head computes are not counted.
    """

    def __init__(self, cluster: HeadCluster) -> None:
        self._cluster = cluster
        self.times = RowTimes()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    def create_table(self, name: str, **settings: Any) -> Any:
        """See ``Cluster.create_table``."""
        return _Timed(self._cluster.create_table(name, **settings), self.times)


class _Timed:
    """A table, or the calls of a model hosted beside it."""

    def __init__(self, target: Any, times: RowTimes) -> None:
        self._target, self._times = target, times

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def pull_into(self, *arguments: Any, **settings: Any) -> None:
        with self._times.pulling():
            self._target.pull_into(*arguments, **settings)

    def compute(self, *arguments: Any, **settings: Any) -> Any:
        with self._times.pulling():
            return self._target.compute(*arguments, **settings)

    def with_wire(self, wire_dtype: Any) -> _Timed:
        return _Timed(self._target.with_wire(wire_dtype), self._times)

    def hosted(self, model: str) -> _Timed:
        return _Timed(self._target.hosted(model), self._times)
