"""The graph service without its transport: what it keeps, who waits for what, and how old it says a graph is."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from geartrain.ams.graph.building.builder import build_neighbours
from geartrain.ams.graph.building.rows import ArrayRows
from geartrain.ams.graph.service import snapshot_graphs
from geartrain.ams.graph.service.graphs import Graphs
from geartrain.ams.graph.service.store import GraphStore
from geartrain.ams.storage.snapshot.folder import new_staging, open_snapshot
from geartrain.ams.values.errors import (
    Cancelled,
    GraphNotFound,
    InvalidArgument,
    NonFinite,
    SchedulerUnavailable,
    SnapshotDamaged,
    TableNotFound,
)
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.placement import ONE_OWNER, even_placement
from geartrain.ams.values.specs import TableSpec

ROWS = np.random.default_rng(5).standard_normal((900, 12)).astype(np.float32)
LABELS = np.array([7, 3, 7, 899])


class FakeCluster:
    """One class table whose pulls a test can hold up."""

    def __init__(self, rows: np.ndarray = ROWS, **spec: Any) -> None:
        self.rows, self.writes, self.is_up = rows, 0, True
        self.spec = TableSpec(name="faces", dim=rows.shape[1], optimizer=SGD(0.1), num_rows=len(rows), **spec)
        self.spec = dataclasses.replace(self.spec, incarnation=1)
        self.may_read = threading.Event()
        self.may_read.set()
        self.is_read = threading.Event()

    def reading(self) -> contextlib.nullcontext[FakeCluster]:
        return contextlib.nullcontext(self)

    def table(self, name: str) -> FakeCluster:
        if name != "faces":
            raise TableNotFound(f"there is no table {name!r}")
        return self

    def pull_into_async(self, ids: np.ndarray, out: np.ndarray) -> Future[None]:
        self.is_read.set()
        assert self.may_read.wait(30)
        out[:] = self.rows[ids]
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def status(self) -> Any:
        if not self.is_up:
            raise SchedulerUnavailable("nobody answers")
        return SimpleNamespace(
            shards=[SimpleNamespace(num_buckets=n) for n in (1366, 1365, 1365)],
            tables=[SimpleNamespace(name="faces", writes=self.writes)],
        )

    def table_incarnations(self) -> dict[str, int]:
        if not self.is_up:
            raise SchedulerUnavailable("nobody answers")
        return {"faces": self.spec.incarnation}

    def make_anew(self) -> None:
        """Drop the table and make another one of its name and settings."""
        self.spec = dataclasses.replace(self.spec, incarnation=self.spec.incarnation + 1)

    def close(self) -> None:
        pass


@pytest.fixture
def cluster() -> FakeCluster:
    return FakeCluster()


@pytest.fixture
def graphs(cluster: FakeCluster) -> Iterator[Graphs]:
    made = Graphs(cluster)
    yield made
    cluster.may_read.set()
    made.close()


def test_what_it_builds_and_selects_is_what_the_builder_and_table_say(cluster: FakeCluster, graphs: Graphs) -> None:
    cluster.writes = 40
    told = []
    built = graphs.build("faces", 6, step=11, progress=told.append).graph
    expected = build_neighbours(ArrayRows(ROWS), 6)
    assert (built.version, built.k, built.num_classes, built.step, built.writes) == (1, 6, 900, 11, 40)
    assert built.whole_bytes == expected.num_bytes and len(built.shard_bytes) == 3
    assert told[-1].done_pairs == told[-1].total_pairs == 900 * 899 // 2
    table, info = graphs.load("faces")
    np.testing.assert_array_equal(table.neighbours, expected.neighbours)
    assert info.fingerprint == built.fingerprint
    chosen = graphs.select("faces", LABELS, 50, seed=3, step=4, version=1)
    np.testing.assert_array_equal(chosen, expected.select(LABELS, 50, seed=3, step=4))


def test_a_graph_says_how_many_writes_its_rows_are_ahead(cluster: FakeCluster, graphs: Graphs) -> None:
    cluster.writes = 5
    graphs.build("faces", 3)
    cluster.writes = 12
    (info,) = graphs.describe().graphs
    assert info.age_writes == 7 and sum(info.shard_bytes) == info.whole_bytes + 2 * 8
    graphs.build("faces", 3, step=1)
    (info,) = graphs.describe().graphs
    assert (info.version, info.age_writes) == (2, 0)
    cluster.writes = 2  # the table was made anew: its writes count from 0 again
    assert graphs.describe().graphs[0].age_writes is None
    cluster.is_up = False
    assert graphs.describe().graphs[0].age_writes is None
    assert len(graphs.select("faces", LABELS, 9, seed=0, step=0)) == 9  # needs no cluster


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_graph_does_not_answer_for_the_next_table_of_its_name(
    cluster: FakeCluster, tmp_path: Path, is_kept: bool
) -> None:
    graphs = Graphs(cluster, store=GraphStore(tmp_path / "graphs"))
    before = graphs.build("faces", 4).graph
    if is_kept:
        graphs = Graphs(cluster, store=GraphStore(tmp_path / "graphs"))
        assert graphs.describe().graphs == (before,)
    cluster.make_anew()
    staging = new_staging(tmp_path / "snapshots", "s")
    assert graphs.write_snapshot(staging.path, staging.id, {"faces": 900}) == []
    with pytest.raises(GraphNotFound, match="build it"):
        graphs.select("faces", LABELS, 50, seed=1, step=2)
    with pytest.raises(GraphNotFound):
        graphs.load("faces")
    assert graphs.describe().graphs == ()
    assert list((tmp_path / "graphs").iterdir()) == []
    assert graphs.build("faces", 4).graph.table_incarnation == 2
    assert graphs.load("faces")[1].version == 1


def test_a_build_of_a_table_that_was_dropped_is_not_joined(cluster: FakeCluster, graphs: Graphs) -> None:
    cluster.may_read.clear()
    old = graphs.start("faces", 4)
    assert cluster.is_read.wait(30)
    cluster.make_anew()
    new = graphs.start("faces", 4)
    assert new is not old
    cluster.may_read.set()
    with pytest.raises(Cancelled):
        old.result.result(30)
    assert new.result.result(30).graph.table_incarnation == 2


def test_who_asks_for_a_build_under_way_joins_it(cluster: FakeCluster, graphs: Graphs) -> None:
    cluster.may_read.clear()
    first = graphs.start("faces", 4, step=2)
    assert graphs.start("faces", 4, step=2) is first
    assert [building.k for building in graphs.describe().building] == [4]
    with pytest.raises(InvalidArgument, match=r"being built with k 4 of step 2, not k 5 of step 2"):
        graphs.start("faces", 5, step=2)
    cluster.may_read.set()
    assert first.result.result(30).graph.version == 1


def test_a_cancelled_build_leaves_the_older_graph(cluster: FakeCluster, graphs: Graphs) -> None:
    graphs.build("faces", 4)
    cluster.may_read.clear()
    build = graphs.start("faces", 5)
    assert graphs.cancel("faces")
    cluster.may_read.set()
    with pytest.raises(Cancelled):
        build.result.result(30)
    assert graphs.load("faces")[1].k == 4
    assert not graphs.cancel("faces") and not graphs.cancel("nowhere")
    with pytest.raises(Cancelled):
        graphs.build("faces", 5, cancelled=lambda: True)
    assert graphs.build("faces", 5).graph.version == 2


def test_a_build_waits_for_another_table_and_can_be_cancelled_meanwhile(cluster: FakeCluster, graphs: Graphs) -> None:
    cluster.may_read.clear()
    first = graphs.start("faces", 4)
    assert cluster.is_read.wait(30)
    second = graphs.start("other", 4)
    second.cancel()
    with pytest.raises(Cancelled):
        second.result.result(30)
    cluster.may_read.set()
    assert first.result.result(30).graph.k == 4


@pytest.mark.parametrize("k", [0, -1, 2**31, 1.5, True])
def test_a_k_that_cannot_be_is_refused(graphs: Graphs, k: Any) -> None:
    with pytest.raises(InvalidArgument, match="k is"):
        graphs.build("faces", k)


def test_what_a_table_cannot_give_is_said_to_whoever_waits(cluster: FakeCluster, graphs: Graphs) -> None:
    with pytest.raises(TableNotFound, match="nowhere"):
        graphs.build("nowhere", 3)
    with pytest.raises(GraphNotFound, match="geartrain graph build faces"):
        graphs.select("faces", LABELS, 9, seed=0, step=0)
    cluster.spec = dataclasses.replace(cluster.spec, num_rows=None)
    with pytest.raises(InvalidArgument, match="hashed"):
        graphs.build("faces", 3)
    cluster.spec = dataclasses.replace(cluster.spec, num_rows=900)
    cluster.rows = ROWS.copy()
    cluster.rows[77, 2] = np.nan
    with pytest.raises(NonFinite, match="class 77"):
        graphs.build("faces", 3)


def test_a_service_that_ends_takes_no_build(graphs: Graphs) -> None:
    graphs.close()
    with pytest.raises(Cancelled, match="ending"):
        graphs.build("faces", 3)


@pytest.mark.parametrize(("num_shards", "k"), [(1, 4), (3, 4), (5, 2000)])
def test_a_graph_in_a_snapshot_comes_back_whole(tmp_path: Path, graphs: Graphs, num_shards: int, k: int) -> None:
    built = graphs.build("faces", k, step=6).graph
    before = graphs.load("faces")[0]
    staging = new_staging(tmp_path, "s")
    sizes = {"faces": 900, "nowhere": 5}
    files = graphs.write_snapshot(staging.path, staging.id, sizes)
    assert {entry.shard for entry in files} == {0}, "one service reads all of it"
    assert graphs.write_snapshot(staging.path, staging.id, {"faces": 901}) == []
    path = staging.commit(
        step=0, created=0.0, num_shards=num_shards, bucket_shards=even_placement(num_shards), tables=[], files=files
    )
    assert open_snapshot(path).verify() == []
    graphs.build("faces", 2)
    assert graphs.restore_snapshot(str(path), {"faces": 1}) == ["faces"]
    after, info = graphs.load("faces")
    np.testing.assert_array_equal(after.neighbours, before.neighbours)
    np.testing.assert_array_equal(after.offsets, before.offsets)
    assert (info.version, info.step, info.k, info.fingerprint) == (1, 6, k, built.fingerprint)
    assert graphs.restore_snapshot(str(path), {"other": 2}) == []


def test_a_snapshot_that_lacks_a_part_of_a_graph_is_damaged(
    tmp_path: Path, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_graphs, "BLOCK_BYTES", 300 * (8 + 4 * 4))
    graphs.build("faces", 4)
    staging = new_staging(tmp_path, "s")
    files = graphs.write_snapshot(staging.path, staging.id, {"faces": 900})
    (Path(staging.path) / files[1].path).unlink()
    path = staging.commit(
        step=0, created=0.0, num_shards=1, bucket_shards=ONE_OWNER, tables=[], files=[files[0], files[2]]
    )
    with pytest.raises(SnapshotDamaged, match="'faces' do not make one"):
        graphs.restore_snapshot(str(path), {"faces": 1})
