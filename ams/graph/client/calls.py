"""Interface of a graph service, the same for an embedded and a remote one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.storage.snapshot.manifest import FileEntry
from geartrain.ams.values.graph_messages import GraphBuilding, GraphBuilt, GraphInfo, GraphsState
from geartrain.ams.values.specs import Ids

OnBuilding = Callable[[GraphBuilding], None]
"""Callback a few times a second while a graph is built, on the thread that waits for it."""


class GraphCalls(Protocol):
    """Graphs of the class tables of one cluster. Thread-safe.

    A graph belongs to one table, not to its name: a later table of the same name does not use it. Every call may raise
    GraphUnavailable, if the service is another process.
    """

    def build(
        self,
        table: str,
        k: int,
        *,
        step: int = 0,
        progress: OnBuilding | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> GraphBuilt:
        """Build the exact graph of ``table`` from its current rows, in the service, and wait for it.

        The present graph serves until the new one replaces it. A build under way with the same
        (k, step) is joined. Cost: C² · D operations and 4 · C · D bytes of pulls there (once more for each part, if the
        service's ``memory_bytes`` do not hold the rows), nothing here.

        Args:
            table: Name of a class table.
            k: Neighbours of a class, at least 1; a class has min(k, C - 1).
            step: Training step of the rows; stored with the graph.
            progress: Callback with the progress, as :data:`OnBuilding`.
            cancelled: Called as often; true ends the build, also for other callers that wait for it.

        Raises:
            InvalidArgument: k < 1, a hashed table, or one that is being built with another k or step.
            TableNotFound: There is no such table.
            NonFinite: A row holds NaN or infinity.
            Cancelled: ``cancelled`` was true, or another caller ended the build.
            ShardUnavailable, SchedulerUnavailable, StateFailed: The rows could not be read, or the graph not saved.
        """

    def cancel(self, table: str) -> bool:
        """Cancel the build of a table; return whether there was one. The present graph stays."""

    def select(self, table: str, labels: Ids, budget: int, *, seed: int, step: int, version: int | None = None) -> Ids:
        """Return the active classes of a batch, selected in the service: the ids of :meth:`NeighbourTable.select`. One
        RPC, 8 · (B + active) bytes.

        Raises GraphNotFound, SpecMismatch if the graph is not ``version``, InvalidArgument, InvalidIds, StateDamaged.
        """

    def describe(self) -> GraphsState:
        """Return all graphs, with their age, and all builds under way. One request to each shard."""

    def load(self, table: str) -> tuple[NeighbourTable, GraphInfo]:
        """Return the whole graph of a table, for a client that selects by itself.

        It has 8 · (C + 1) + 4 · C · min(k, C - 1) bytes. Its age is not set. Raises GraphNotFound, StateDamaged,
        ProtocolError if it arrived damaged.
        """

    def forget(self, table: str) -> None:
        """Drop the graph of a table, if there is one, and cancel its build."""

    def write_snapshot(self, folder: str, snapshot_id: str, tables: Mapping[str, int]) -> list[FileEntry]:
        """Write the graphs of ``tables`` (name -> number of classes) into a staging folder.

        A table without a graph, or with one of another number of classes, is skipped. Raises StateDamaged,
        SnapshotFailed.
        """

    def restore_snapshot(self, folder: str, tables: Mapping[str, int]) -> list[str]:
        """Load the graphs of ``tables`` (name -> incarnation, as restored) from a snapshot; return the tables that had
        one. The graphs of the others are dropped.

        Raises SnapshotDamaged, StateFailed.
        """

    def close(self) -> None:
        """Stop all work in this process. Idempotent."""
