"""Build of a graph of nearest classes, in the foreground or background, and its result on every rank."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Protocol

import numpy as np

from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.head.selection.graph_by_list import GraphParts

_SECONDS_TO_END = 30.0
OnPairs = Callable[[int, int], None]
"""Called with (done, total) while a graph is built; from a thread of its own in the background."""


class GraphRows(Protocol):
    """Rows from which one graph of nearest classes is built."""

    @property
    def one_at_a_time(self) -> bool:
        """Whether a build waits until a cancelled earlier one has ended."""

    def build(
        self, k: int, progress: Callable[[int, int], None] | None, cancelled: Callable[[], bool]
    ) -> NeighbourTable:
        """Return the graph of ``k`` neighbours; ``progress(done, total)`` is called meanwhile."""


class GraphSource(Protocol):
    """Source of one head's rows for its graphs."""

    @property
    def parts(self) -> GraphParts | None:
        """Division of a graph's lists among the ranks; None: each process keeps all."""

    def rows(self, live_classes: LiveClasses, step: int, *, beside_training: bool = False) -> GraphRows:
        """Return the live classes' rows as they are at ``step``; the graph may be built by another thread."""


class GraphBuild:
    """Build of a graph."""

    def __init__(self, step: int, after: GraphBuild | None) -> None:
        """``after`` is the cancelled build before; a graph service gets this one once it knows of the cancellation."""
        self.step = step
        self._after = after
        self.result: Future[NeighbourTable] = Future()
        self._cancelled = threading.Event()

    def run(self, rows: GraphRows, k: int, progress: OnPairs | None) -> None:
        """Build; store the result, or the error, in ``result``."""
        after, self._after = self._after, None
        if after is not None and rows.one_at_a_time:
            wait_for([after.result])
        try:
            built = build_graph(rows, k, progress, self._cancelled.is_set)
        except Exception as exc:
            self.result.set_exception(exc)
        else:
            self.result.set_result(built)

    def start(self, rows: GraphRows, k: int, progress: OnPairs | None) -> None:
        """Do :meth:`run` in a background thread.

        A process that exits meanwhile cancels the build and waits for it: a thread that returns from compiled code to a
        finalized interpreter aborts the whole process.
        """

        def work() -> None:
            try:
                self.run(rows, k, progress)
            finally:
                atexit.unregister(finish)

        def finish() -> None:
            self.cancel()
            thread.join(_SECONDS_TO_END)

        thread = threading.Thread(target=work, name="geartrain-graph", daemon=True)
        atexit.register(finish)
        thread.start()

    def cancel(self) -> None:
        """Cancel the build; it ends soon."""
        self._cancelled.set()


def build_graph(rows: GraphRows, k: int, progress: OnPairs | None, cancelled: Callable[[], bool]) -> NeighbourTable:
    """Return the graph of the rows, built now."""
    return rows.build(k, progress, cancelled)


def built_for_all(ranks: Communicator | None, build: Callable[[], NeighbourTable]) -> NeighbourTable:
    """Return on every rank the graph that rank 0 builds; without ``ranks``, that of ``build``, which is collective."""
    if ranks is None:
        return build()
    built: list[NeighbourTable] = []
    ranks.first_then_others(lambda: built.append(build()), lambda: None)
    nothing = np.empty(0, np.int64)
    offsets = ranks.array_from_first(built[0].offsets if built else nothing)
    neighbours = ranks.array_from_first(built[0].neighbours if built else nothing)
    k = ranks.array_from_first(np.array([built[0].k if built else 0], np.int64))
    return built[0] if built else NeighbourTable(offsets, neighbours, int(k[0]))
