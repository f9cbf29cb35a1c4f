"""Builds that end in the very moment in which their graph is dropped, or another one is restored."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from geartrain.ams.graph.building.builder import build_neighbours
from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.graph.building.rows import ArrayRows
from geartrain.ams.graph.service.graphs import Build, Graphs
from geartrain.ams.graph.service.store import GraphStore, RowsVersion
from geartrain.ams.storage.snapshot.folder import new_staging
from geartrain.ams.values.errors import Cancelled, GraphNotFound
from geartrain.ams.values.placement import even_placement
from tests.unit.ams.graph.test_graphs import ROWS, FakeCluster


class SlowGraphs(Graphs):
    """Its builds can be held when all is done but to keep the graph."""

    may_keep: threading.Event
    is_built: threading.Event

    def _replace(self, graph: NeighbourTable, version: RowsVersion, *rest: object) -> None:
        if rest:
            self.is_built.set()
            assert self.may_keep.wait(30)
        super()._replace(graph, version, *rest)  # type: ignore[arg-type]


@pytest.fixture
def graphs(tmp_path: Path) -> Iterator[SlowGraphs]:
    made = SlowGraphs(FakeCluster(), store=GraphStore(tmp_path / "graphs"))
    made.may_keep, made.is_built = threading.Event(), threading.Event()
    made.may_keep.set()
    yield made
    made.may_keep.set()
    made.close()


def held_build(graphs: SlowGraphs, k: int) -> Build:
    graphs.may_keep.clear()
    graphs.is_built.clear()
    build = graphs.start("faces", k)
    assert graphs.is_built.wait(30)
    return build


def end(graphs: SlowGraphs, build: Build) -> None:
    graphs.may_keep.set()
    with pytest.raises(Cancelled):
        build.result.result(30)


def test_a_graph_that_was_dropped_does_not_come_back(graphs: SlowGraphs) -> None:
    build = held_build(graphs, 4)
    graphs.forget("faces")
    end(graphs, build)
    with pytest.raises(GraphNotFound):
        graphs.load("faces")
    assert graphs.describe().graphs == ()


def test_a_graph_that_was_restored_is_not_replaced_by_one_of_the_rows_before(
    graphs: SlowGraphs, tmp_path: Path
) -> None:
    graphs.build("faces", 4)
    staging = new_staging(tmp_path, "s")
    files = graphs.write_snapshot(staging.path, staging.id, {"faces": 900})
    path = staging.commit(step=0, created=0.0, num_shards=2, bucket_shards=even_placement(2), tables=[], files=files)
    build = held_build(graphs, 5)
    assert graphs.restore_snapshot(str(path), {"faces": 1}) == ["faces"]
    end(graphs, build)
    found, info = graphs.load("faces")
    assert info.k == 4
    assert found.neighbours.tolist() == build_neighbours(ArrayRows(ROWS), 4).neighbours.tolist()
