"""Graphs of a head whose rows are in a cluster: built here from pulled rows, or by the cluster's graph service and then
loaded whole, since heads select by themselves (``docs/decisions/0016``).

Costs of the service: no operations here and no pull of rows; 4·C·k + 8·C bytes are received for each graph.
"""

from __future__ import annotations

from collections.abc import Callable

from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.graph.building.rows import TableRows
from geartrain.ams.graph.client.calls import GraphCalls
from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.values.errors import SpecMismatch, TableNotFound
from geartrain.ams.values.graph_messages import GraphBuilding
from geartrain.ams.values.specs import TableSpec
from geartrain.bridge.head.selection.graph_build import GraphRows
from geartrain.bridge.rows.tables import ReadableTable


class TableGraphs:
    """Implementation of ``GraphSource``: the service builds, unless classes are retired."""

    parts = None

    def __init__(self, table: ReadableTable, service: GraphCalls | None = None) -> None:
        """``service`` is that of the cluster; None: there is none."""
        self._table, self._service = table, service

    def rows(self, live_classes: LiveClasses, step: int, *, beside_training: bool = False) -> GraphRows:
        del beside_training
        if self._service is not None and live_classes.are_all:
            return ServedRows(self._service, self._table.spec, step)
        return PulledRows(self._table, live_classes)


class PulledRows(TableRows):
    """Rows of the live classes, pulled while the graph is built in this process."""

    one_at_a_time = False

    def build(
        self, k: int, progress: Callable[[int, int], None] | None, cancelled: Callable[[], bool]
    ) -> NeighbourTable:
        # Import here: only heads that select by a graph need the builder.
        from geartrain.ams.graph.building.builder import build_neighbours

        return build_neighbours(self, k, progress=progress, cancelled=cancelled)


class ServedRows:
    """Rows of a head's table, as the cluster's graph service reads them."""

    one_at_a_time = True

    def __init__(self, service: GraphCalls, spec: TableSpec, step: int) -> None:
        """``step`` is the step of the rows."""
        self._service, self._spec, self._step = service, spec, step

    def build(
        self, k: int, progress: Callable[[int, int], None] | None, cancelled: Callable[[], bool]
    ) -> NeighbourTable:
        """Return the graph of the rows as the service finds them. Raises as :meth:`GraphCalls.build`; SpecMismatch if
        another job had one of another k or size built meanwhile, TableNotFound if the table was replaced by another of
        its name."""

        total = 0

        def report(building: GraphBuilding) -> None:
            nonlocal total
            total = building.total_pairs
            if progress is not None and building.done_pairs < total:
                progress(building.done_pairs, total)

        name = self._spec.name
        self._service.build(name, k, step=self._step, progress=report, cancelled=cancelled)
        table, info = self._service.load(name)
        if progress is not None and total:
            progress(total, total)  # once, and when the graph is here
        if (info.k, info.num_classes) != (k, self._spec.num_rows):
            raise SpecMismatch(
                f"the graph of table {name!r} is of {info.num_classes} classes with k {info.k} now, not of "
                f"{self._spec.num_rows} with k {k}: another job has it built, too; give each job a table of its own"
            )
        if info.table_incarnation not in (0, self._spec.incarnation):
            raise TableNotFound(
                f"table {name!r} was dropped, and made or restored anew, since this head opened it; make the head anew"
            )
        return table
