"""The graph service as a process of its own: it answers as the embedded one, and outlives kills and damage."""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.table import Table
from geartrain.ams.graph.service.graphs import Graphs
from geartrain.ams.graph.service.role import GraphServer
from geartrain.ams.values.config import ClientConfig, GraphConfig
from geartrain.ams.values.errors import (
    Cancelled,
    ConfigError,
    GraphNotFound,
    GraphUnavailable,
    InternalError,
    InvalidArgument,
    InvalidIds,
    SpecMismatch,
    StateDamaged,
    TableNotFound,
)
from geartrain.ams.values.graph_messages import GraphBuilding, GraphsState
from geartrain.cli.main import build_app
from geartrain.launch.connected.graph_role import ConnectedCluster
from tests.faults.children import Child, serve
from tests.integration.conftest import QUICK, ServedCluster

ROWS = np.random.default_rng(7).standard_normal((1500, 16)).astype(np.float32)
LABELS = np.array([7, 3, 7, 1499])
SMALL = {"memory_bytes": 220_000}
"""Cuts the build of these rows into parts."""


@contextmanager
def graph_role(
    scheduler: str, data: Path | None = None, armed: str = "", **settings: Any
) -> Iterator[tuple[Child, str]]:
    """A process that serves graphs, and its address; it is killed at the end."""
    settings = {"listen": "127.0.0.1:0", "scheduler": scheduler, "data": data and str(data), **settings}
    child = Child(serve, "graph", settings, armed=armed)
    try:
        yield child, child.receive()
    finally:
        child.end()


def connected(scheduler: str, graph: str, **settings: Any) -> Cluster:
    return gt.connect(scheduler, config=ClientConfig(graph=graph, **settings))


def with_faces(cluster: Cluster, rows: np.ndarray = ROWS) -> Table:
    table = cluster.create_table("faces", dim=rows.shape[1], num_rows=len(rows), optimizer=gt.SGD(0.1))
    table.assign(np.arange(len(rows)), rows)
    return table


def cli(*arguments: str) -> None:
    """Run a command in this process. Raises SystemExit unless it exits with 0."""
    try:
        build_app(arguments)(arguments)
    except SystemExit as done:
        if done.code:
            raise


def test_it_answers_as_the_embedded_one_and_keeps_its_graphs(
    served: Callable[..., ServedCluster], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with gt.local() as embedded:
        with_faces(embedded)
        expected = embedded.graph.build("faces", 6, step=9).graph
        wanted = embedded.graph.select("faces", LABELS, 60, seed=2**64 - 1, step=5)
        table = embedded.graph.load("faces")[0]
    address = served(2).address
    with graph_role(address, tmp_path) as (_, graph), connected(address, graph) as cluster:
        faces = with_faces(cluster)
        with pytest.raises(GraphNotFound, match="geartrain graph build faces"):
            cluster.graph.select("faces", LABELS, 60, seed=0, step=0)
        told: list[GraphBuilding] = []
        built = cluster.graph.build("faces", 6, step=9, progress=told.append).graph
        assert (built.fingerprint, built.k, built.step, built.version) == (expected.fingerprint, 6, 9, 1)
        assert told[-1].done_pairs == told[-1].total_pairs == 1500 * 1499 // 2
        found = cluster.graph.select("faces", LABELS, 60, seed=2**64 - 1, step=5, version=1)
        np.testing.assert_array_equal(found, wanted)
        loaded, info = cluster.graph.load("faces")
        np.testing.assert_array_equal(loaded.neighbours, table.neighbours)
        np.testing.assert_array_equal(loaded.offsets, table.offsets)
        assert info.whole_bytes == table.num_bytes
        faces.push(np.arange(40), np.ones((40, 16), np.float32))
        (aged,) = cluster.graph.describe().graphs
        assert aged.age_writes == 2 and len(aged.shard_bytes) == 2  # one write on each shard
        for error, call in (
            (InvalidArgument, lambda: cluster.graph.select("faces", LABELS, 0, seed=0, step=0)),
            (InvalidIds, lambda: cluster.graph.select("faces", np.array([1500]), 5, seed=0, step=0)),
            (InvalidIds, lambda: cluster.graph.select("faces", np.array([1.5]), 5, seed=0, step=0)),
            (SpecMismatch, lambda: cluster.graph.select("faces", LABELS, 5, seed=0, step=0, version=8)),
            (TableNotFound, lambda: cluster.graph.build("nowhere", 3)),
            (InvalidArgument, lambda: cluster.graph.build("faces", 0)),
        ):
            with pytest.raises(error):
                call()
        cli("health", graph)
        cli("status", f"--scheduler={address}", f"--graph={graph}")
        shown = capsys.readouterr().out
        assert "faces: version 1 of step 9, 1,500 classes, k 6" in shown and "2 writes old" in shown
        assert re.search(r"on 2 shards [\d.]+ KiB each at most", shown)
    with graph_role(address, tmp_path) as (_, graph), connected(address, graph) as cluster:
        found = cluster.graph.select("faces", LABELS, 60, seed=2**64 - 1, step=5)
        np.testing.assert_array_equal(found, wanted)
        cluster.drop_table("faces")
        assert cluster.graph.describe().graphs == ()


def test_a_build_outlives_a_kill_of_its_service_and_goes_on_where_it_was(
    served: Callable[..., ServedCluster], tmp_path: Path
) -> None:
    address = served(1).address
    with (
        graph_role(address, tmp_path, "graph.part.after=kill@3", **SMALL) as (process, graph),
        connected(address, graph) as cluster,
    ):
        with_faces(cluster)
        outcome: list[Any] = []
        waiting = threading.Thread(target=lambda: outcome.append(cluster.graph.build("faces", 5)))
        waiting.start()
        assert process.exit_code(60) == -signal.SIGKILL
        with graph_role(address, tmp_path, listen=graph, **SMALL):
            waiting.join(60)
            (built,) = outcome
            table = cluster.graph.load("faces")[0]
        with gt.local() as embedded:
            with_faces(embedded)
            whole = embedded.graph.build("faces", 5)
            np.testing.assert_array_equal(table.neighbours, embedded.graph.load("faces")[0].neighbours)
    assert whole.resumed_pairs == 0 < built.resumed_pairs < 1500 * 1499 // 2
    assert built.graph.fingerprint == whole.graph.fingerprint


def test_somebody_else_can_cancel_a_build(
    served: Callable[..., ServedCluster], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address, go_on = served(1).address, tmp_path / "go-on"
    with (
        graph_role(address, None, f"graph.part.after=pause({go_on})@2", **SMALL) as (_, graph),
        connected(address, graph) as cluster,
    ):
        with_faces(cluster)
        begun = threading.Event()
        errors: list[BaseException] = []

        def build() -> None:
            try:
                cluster.graph.build("faces", 5, progress=lambda _: begun.set())
            except Cancelled as exc:
                errors.append(exc)

        waiting = threading.Thread(target=build)
        waiting.start()
        assert begun.wait(30)
        cli("graph", "cancel", "faces", f"--graph={graph}")
        go_on.touch()
        waiting.join(30)
        assert len(errors) == 1 and "cancelled" in str(errors[0])
        with pytest.raises(SystemExit, match="1"):
            cli("graph", "cancel", "faces", f"--graph={graph}")
        capsys.readouterr()
        cli("graph", "build", "faces", "--k=4", f"--graph={graph}", "--json")
        assert json.loads(capsys.readouterr().out)["k"] == 4


def test_damage_on_disk_is_named_and_built_again_and_a_folder_has_one_service(
    served: Callable[..., ServedCluster], tmp_path: Path
) -> None:
    address = served(1).address
    with graph_role(address, tmp_path / "a") as (_, graph), connected(address, graph) as cluster:
        with_faces(cluster)
        cluster.graph.build("faces", 5)
        neighbours = cluster.graph.load("faces")[0].neighbours
    (path,) = (tmp_path / "a" / "graphs").iterdir()
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(bytes(data))
    with graph_role(address, tmp_path / "a") as (_, graph), connected(address, graph) as cluster:
        with pytest.raises(StateDamaged, match=rf"'faces': {path} is damaged"):
            cluster.graph.load("faces")
        assert cluster.graph.describe().graphs == ()
        cluster.graph.build("faces", 5)
        np.testing.assert_array_equal(cluster.graph.load("faces")[0].neighbours, neighbours)
    with graph_role(address, tmp_path / "a"):
        server = GraphServer(
            GraphConfig(listen="127.0.0.1:0", data=str(tmp_path / "a")), ConnectedCluster(address, QUICK)
        )
        with pytest.raises(ConfigError, match="in use by another"):
            server.start()


def test_a_service_whose_graphs_take_long_to_load_is_there(
    served: Callable[..., ServedCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loads(_: Graphs) -> GraphsState:
        raise InternalError("it loads every graph")

    monkeypatch.setattr(Graphs, "describe", loads)
    server = GraphServer(GraphConfig(listen="127.0.0.1:0"), ConnectedCluster(served(1).address, QUICK))
    try:
        with pytest.raises(SystemExit, match="1"):  # there is no build to cancel
            cli("graph", "cancel", "faces", f"--graph={server.start()}")
    finally:
        server.stop(0)


def test_a_service_that_is_not_there_is_named(
    served: Callable[..., ServedCluster], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    address = served(1).address
    with graph_role(address) as (_, gone):
        pass
    with connected(address, gone, recovery_timeout_seconds=0.3) as cluster:
        with pytest.raises(GraphUnavailable, match=f"geartrain graph --listen {gone}"):
            cluster.graph.describe()
        assert caplog.text.count("trying again for up to 0.3 s. Else start it") == 1, "who waits is told why, once"
        with pytest.raises(GraphUnavailable):
            cluster.graph.build("faces", 3)
    with pytest.raises(SystemExit, match="1"):
        cli("status", f"--scheduler={address}", f"--graph={gone}", "--json")
    shown = capsys.readouterr()
    assert json.loads(shown.out)["graph_service"] is None
    assert "does not answer" in shown.err
    with gt.connect(address) as cluster:
        assert cluster.graph_service is None
        with pytest.raises(ConfigError, match="GEARTRAIN_CLIENT__GRAPH"):
            _ = cluster.graph


def test_an_open_network_needs_consent() -> None:
    with pytest.raises(ConfigError, match="--insecure"):
        cli("graph", "--listen=0.0.0.0:0")


def test_graphs_travel_in_snapshots_onto_other_shards(
    served: Callable[..., ServedCluster], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with gt.local(3) as embedded:
        with_faces(embedded)
        embedded.create_table("other", dim=4, num_rows=10, optimizer=gt.SGD(0.1))
        embedded.graph.build("faces", 6, step=4)
        expected = embedded.graph.load("faces")[0]
        path = embedded.snapshot(tmp_path, "s").result()
        bare = embedded.snapshot(tmp_path, "bare", graphs=False).result()
    address = served(2).address
    with graph_role(address) as (_, graph), connected(address, graph) as cluster:
        cluster.restore(path)
        found, info = cluster.graph.load("faces")
        np.testing.assert_array_equal(found.neighbours, expected.neighbours)
        assert (info.step, info.k) == (4, 6)
        assert cluster.graph.describe().graphs[0].age_writes == 0
        again = cluster.snapshot(tmp_path, "again").result()
        cluster.restore(bare, replace=True)
        assert cluster.graph.describe().graphs == ()
        where = ("--scheduler", address, "--graph", graph)
        cli("snapshot", "restore", str(again), "--replace", *where)
        cli("snapshot", "create", str(tmp_path), "--name", "told", *where)
        told = capsys.readouterr().out
        assert told.count(", 1 graph") == 2 and told.count("1,500 rows") == 2
    with gt.local() as embedded:
        embedded.restore(again)
        np.testing.assert_array_equal(embedded.graph.load("faces")[0].neighbours, expected.neighbours)


def test_a_snapshot_does_without_a_graph_service_that_is_gone(
    served: Callable[..., ServedCluster], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = served(1).address
    with graph_role(address) as (_, gone):
        pass
    with connected(address, gone, recovery_timeout_seconds=0.2) as cluster:
        with_faces(cluster)
        path = cluster.snapshot(tmp_path, "s").result()
        cluster.restore(path, replace=True)
        assert "were not restored" in caplog.text
        np.testing.assert_array_equal(cluster.table("faces").pull(np.arange(1500)), ROWS)
    assert "holds no graph" in caplog.text
