"""Heads that select by a graph have the graph service of their cluster build it, and train as if they had built it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.graph.service.graphs import Graphs
from geartrain.ams.graph.service.role import GraphServer
from geartrain.ams.observe.failpoints import armed
from geartrain.ams.storage.snapshot.folder import open_snapshot
from geartrain.ams.storage.snapshot.manifest import GRAPH
from geartrain.ams.values.config import ClientConfig, GraphConfig
from geartrain.ams.values.errors import (
    Cancelled,
    ConfigError,
    GraphNotFound,
    InvalidArgument,
    SpecMismatch,
    TableNotFound,
)
from geartrain.bridge.head.selection import graph_build
from geartrain.bridge.head.selection.knn_selection import KNNSelection
from geartrain.bridge.head.selection.served_graph import ServedRows
from geartrain.cli.main import build_app
from geartrain.launch.connected.graph_role import ConnectedCluster
from geartrain.workers.recipes.recipe import ClassifyRecipe
from tests.integration.conftest import QUICK, ServedCluster
from tests.integration.jobs.small_job import GREY, said_by

CLASSES, DIM = 120, 6


@pytest.fixture
def graph_server(served: Callable[..., ServedCluster]) -> Iterator[tuple[str, str]]:
    """Addresses of a scheduler and of a graph service, both of this process."""
    scheduler = served(2).address
    server = GraphServer(GraphConfig(listen="127.0.0.1:0"), ConnectedCluster(scheduler, QUICK))
    yield scheduler, server.start()
    server.stop(0)


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """What heads of this process have graphs built from."""
    seen: list[type] = []
    plain = graph_build.build_graph

    def spy(rows: object, *arguments: object) -> object:
        seen.append(type(rows))
        return plain(rows, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(graph_build, "build_graph", spy)
    return seen


def make_head(cluster: Cluster, rebuild: str | int = 3, k: int = 4) -> gt.ClassHead:
    select = gt.KNNSoftmax(active=0.2, k=k, rebuild=rebuild, seed=5)
    return gt.ClassHead(cluster, "classes", num_classes=CLASSES, dim=DIM, select=select, margin=gt.CosFace(8, 0.2))


def train(head: gt.ClassHead, steps: int) -> list[float]:
    rows, losses = gt.RowOptimizer(head, lr=0.1), []
    for _ in range(steps):
        generator = torch.Generator().manual_seed(head.step)
        loss = head(torch.randn(4, DIM, generator=generator), torch.randint(CLASSES, (4,), generator=generator))
        loss.backward()
        rows.step()
        rows.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_a_head_trains_on_the_graphs_of_the_service_as_on_its_own(
    graph_server: tuple[str, str], sources: list[type]
) -> None:
    scheduler, graph = graph_server
    with gt.local(2) as embedded:
        expected = train(make_head(embedded), 8)
    assert ServedRows not in sources
    sources.clear()
    with gt.connect(scheduler, config=ClientConfig(graph=graph)) as cluster:
        head = make_head(cluster)
        assert isinstance(head.select, KNNSelection)
        told: list[tuple[int, int]] = []
        head.select.on_progress = lambda done, total: told.append((done, total))
        assert train(head, 8) == expected
        assert sources == [ServedRows] * 3
        assert [done for done, total in told if done == total] == [CLASSES * (CLASSES - 1) // 2] * 3
        (info,) = cluster.graph.describe().graphs
        assert (info.table, info.version, info.step, info.k) == ("classes", 3, 6, 4)
        assert head.select.graph_age == 2


def test_a_build_beside_the_training_is_taken_when_it_is_there(graph_server: tuple[str, str]) -> None:
    scheduler, graph = graph_server
    with gt.connect(scheduler, config=ClientConfig(graph=graph)) as cluster:
        head = make_head(cluster, "background")
        assert isinstance(head.select, KNNSelection)
        train(head, 2)
        head.next_epoch()
        train(head, 1)
        pending = head.select._pending
        assert pending is not None
        pending.result.result(30)
        train(head, 1)
        assert head.select.graph is not None and (head.select.graph.version, head.select.graph.step) == (2, 2)
        assert cluster.graph.describe().graphs[0].step == 2


def test_a_cancelled_build_ends_in_the_service_too(
    graph_server: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, graph = graph_server
    go_on, arrived, cancel = tmp_path / "go-on", threading.Event(), Graphs.cancel

    def noted_cancel(self: Graphs, table: str) -> bool:
        try:
            return cancel(self, table)
        finally:
            arrived.set()

    monkeypatch.setattr(Graphs, "cancel", noted_cancel)
    with gt.connect(scheduler, config=ClientConfig(graph=graph)) as cluster:
        head = make_head(cluster, "background")
        assert isinstance(head.select, KNNSelection)
        train(head, 1)
        with armed(f"graph.part.after=pause({go_on})"):
            head.next_epoch()
            train(head, 1)
            pending = head.select._pending
            assert pending is not None
            head.select.cancel()
            is_told = arrived.wait(30)
            go_on.touch()
        assert is_told and isinstance(pending.result.exception(30), Cancelled)
        assert [info.version for info in cluster.graph.describe().graphs] == [1]
        assert train(head, 1)


def test_two_jobs_that_share_a_table_but_not_k_are_told(graph_server: tuple[str, str]) -> None:
    scheduler, graph = graph_server
    with gt.connect(scheduler, config=ClientConfig(graph=graph)) as cluster:
        head = make_head(cluster)

        class Meddling:
            """A service in which another job builds right after."""

            def build(self, *_: object, **__: object) -> None:
                cluster.graph.build("classes", 9)

            def load(self, table: str) -> object:
                return cluster.graph.load(table)

        rows = ServedRows(Meddling(), head.table.spec, 0)  # type: ignore[arg-type]
        with pytest.raises(SpecMismatch, match="k 9 now, not of 120 with k 4"):
            rows.build(4, None, lambda: False)


def test_a_head_of_a_dropped_table_takes_no_graph_of_the_next_one(graph_server: tuple[str, str]) -> None:
    scheduler, graph = graph_server
    with gt.connect(scheduler, config=ClientConfig(graph=graph)) as cluster:
        older = make_head(cluster)
        cluster.drop_table("classes")
        make_head(cluster)
        with pytest.raises(TableNotFound, match="make the head anew"):
            ServedRows(cluster.graph, older.table.spec, 0).build(4, None, lambda: False)


def test_the_graph_of_a_table_that_was_dropped_elsewhere_is_in_no_answer_and_no_snapshot(
    graph_server: tuple[str, str], tmp_path: Path
) -> None:
    scheduler, graph = graph_server
    labels = np.array([1, 2])
    with gt.connect(scheduler, config=ClientConfig(graph=graph)) as cluster:
        make_head(cluster)
        cluster.graph.build("classes", 4)
        with gt.connect(scheduler) as other:  # which knows of no graph service
            other.drop_table("classes")
            make_head(other)
        taken = cluster.snapshot(tmp_path / "snapshots", step=1).result()
        with pytest.raises(GraphNotFound):
            cluster.graph.select("classes", labels, 9, seed=1, step=1)
        assert not [entry for entry in open_snapshot(taken).manifest.files if entry.kind == GRAPH]
        cluster.graph.build("classes", 4)
        taken = cluster.snapshot(tmp_path / "snapshots", step=2).result()
        expected = cluster.graph.select("classes", labels, 9, seed=1, step=1)
        cluster.restore(taken, replace=True)
        assert cluster.graph.select("classes", labels, 9, seed=1, step=1).tolist() == expected.tolist()


def test_a_workers_job_uses_the_service(graph_server: tuple[str, str], sources: list[type], tmp_path: Path) -> None:
    scheduler, graph = graph_server
    random = np.random.default_rng(0)
    for number in range(6):
        folder = tmp_path / "images" / str(number)
        folder.mkdir(parents=True)
        for copy in range(3):
            Image.fromarray(random.integers(0, 255, (32, 32), np.uint8)).save(folder / f"{copy}.png")
    recipe = ClassifyRecipe(
        steps=3,
        batch_size=6,
        width=8,
        dim=8,
        select="knn",
        sample_rate=0.5,
        neighbours=2,
        rebuild=2,
        warmup_steps=1,
        look=GREY,
        held_out=0.4,
    )
    said = said_by(tmp_path / "run", tmp_path / "images", recipe, scheduler=scheduler, graph=graph)
    assert sources == [ServedRows] * 2
    assert said.count("Graph of 6 classes built in") == 2
    with gt.connect(scheduler, config=ClientConfig(graph=graph)) as cluster:
        assert cluster.graph.describe().graphs == ()  # it went with the job's table


def test_a_worker_without_a_cluster_has_no_graph_service() -> None:
    with pytest.raises(ConfigError, match="give --scheduler"):
        build_app(["worker"])(["worker", "glyphs", "--graph=127.0.0.1:1"], standalone_mode=False)
    with gt.local() as embedded, pytest.raises(InvalidArgument, match="hashed"):
        embedded.create_table("t", dim=2, optimizer=gt.SGD(0.1))
        embedded.graph.build("t", 3)
