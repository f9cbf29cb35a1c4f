"""What another process may say of snapshots: a place of a known kind, below the role's roots, and an id."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect
from geartrain.ams.graph.service.role import GraphServer
from geartrain.ams.pb.v1 import graph_pb2, scheduler_pb2, shard_pb2
from geartrain.ams.rpc.client.gear import GrpcGearCarrier
from geartrain.ams.rpc.services import GRAPH, SCHEDULER, SHARD
from geartrain.ams.server.role import ShardServer
from geartrain.ams.storage.snapshot import roots as snapshot_roots
from geartrain.ams.values.config import ClientConfig, GraphConfig, ServerConfig
from geartrain.ams.values.errors import ConfigError, GeartrainError, SnapshotRefused, error_named
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.launch.graph_role import ConnectedCluster
from tests.integration.conftest import ServedCluster

ID = "0" * 32
IDS = np.arange(100)
ROWS = np.random.default_rng(3).standard_normal((100, 8)).astype(np.float32)


@pytest.fixture
def off_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """The roles of this test count as reachable from other machines."""
    monkeypatch.setattr(snapshot_roots, "is_loopback", lambda _: False)


class Roles:
    """A shard and a graph service of one cluster, and a client of both."""

    def __init__(self, stack: contextlib.ExitStack, roots: tuple[str, ...] | None) -> None:
        served = ServedCluster(1, snapshot_roots=roots)
        stack.callback(served.stop)
        graphs = GraphServer(
            GraphConfig(listen="127.0.0.1:0", scheduler=served.address, snapshot_roots=roots),
            ConnectedCluster(served.address, ClientConfig()),
        )
        listening = graphs.start()
        stack.callback(graphs.stop, 0)
        self.cluster: Cluster = stack.enter_context(connect(served.address, config=ClientConfig(graph=listening)))
        self.table = self.cluster.create_table("t", dim=8, num_rows=100, optimizer=SGD(0.1))
        self.table.assign(IDS, ROWS)
        self.cluster.graph.build("t", 4)
        shard = stack.enter_context(grpc.insecure_channel(self.cluster.status().shards[0].address))
        graph = stack.enter_context(grpc.insecure_channel(listening))
        self._ways = {SHARD.name: shard, GRAPH.name: graph}

    def refusal(self, service: str, method: str, request: Any) -> GeartrainError:
        """The error that a call to a role ends with."""
        with pytest.raises(grpc.RpcError) as caught:
            self._ways[service].unary_unary(f"/{service}/{method}")(request.SerializeToString(), timeout=20)
        assert isinstance(caught.value, grpc.Call)
        name = dict(caught.value.trailing_metadata() or ()).get("geartrain-error")
        return error_named(str(name))(caught.value.details())

    def refusals(self, folder: str) -> list[GeartrainError]:
        """What becomes of every call that names a folder."""
        return [
            self.refusal(SHARD.name, "Restore", shard_pb2.RestoreRequest(folder=folder, tables=["t"])),
            self.refusal(SHARD.name, "Restore", shard_pb2.RestoreRequest(folder=folder)),
            self.refusal(SHARD.name, "WriteFrozen", shard_pb2.WriteFrozenRequest(folder=folder, snapshot_id=ID)),
            self.refusal(
                GRAPH.name,
                "RestoreGraphs",
                graph_pb2.RestoreGraphsRequest(folder=folder, tables=["t"], incarnations=[1]),
            ),
            self.refusal(
                GRAPH.name,
                "WriteGraphs",
                graph_pb2.WriteGraphsRequest(
                    folder=folder,
                    snapshot_id=ID,
                    tables=[graph_pb2.GraphTable(table="t", num_classes=100)],
                ),
            ),
        ]


@pytest.fixture
def roles() -> Iterator[Callable[..., Roles]]:
    with contextlib.ExitStack() as stack:
        yield lambda *roots: Roles(stack, roots or None)


def test_no_url_of_a_peer_makes_a_role_connect_or_read_elsewhere(roles: Callable[..., Roles], tmp_path: Path) -> None:
    ours = roles()
    references = tmp_path / "references.json"
    references.write_text('{"version": 1, "templates": {"u": "{{ 1 }}"}, "refs": {"a/manifest.json": "{{ u }}"}}')
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for url in (
            f"reference://::file://{references}",
            f"simplecache::ftp://127.0.0.1:{port}/x/{ID}",
            f"ftp://127.0.0.1:{port}/x/{ID}",
            f"http://127.0.0.1:{port}/x/{ID}",
            f"memory://x/{ID}",
            f"s3://bucket/x?endpoint=127.0.0.1:{port}",
        ):
            assert [type(error).__name__ for error in ours.refusals(url)] == ["InvalidArgument"] * 5, url
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
    np.testing.assert_array_equal(ours.table.pull(IDS), ROWS)


@pytest.mark.usefixtures("off_loopback")
def test_a_role_with_roots_reads_and_writes_only_below_them_and_tells_nothing_of_the_rest(
    roles: Callable[..., Roles], tmp_path: Path
) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root, outside, outside / f".staging-a-{ID}"):
        folder.mkdir()
    (outside / "file").write_text("a secret")
    (root / "link").symlink_to(outside)
    (root / "loop").symlink_to(root / "loop")
    ours = roles(str(root), "s3://bucket/runs")
    places = [
        *(outside, outside / "file", outside / "none", outside / f".staging-a-{ID}", root, "/", "/etc/passwd"),
        *(f"{root}/../outside", f"{root}/link", f"{root}/link/none", f"{root}/a/../../outside", f"{root}x", "etc"),
        *(f"file://{outside}", "s3://bucket/other", "s3://bucket/runs", "s3://bucket/runsx/y", "gs://bucket/runs/x"),
    ]
    said: dict[str, set[str]] = {"server": set(), "graph": set()}
    for where in map(str, places):
        errors = ours.refusals(where)
        assert all(isinstance(error, SnapshotRefused) for error in errors), where
        for error in errors:
            role = "server" if "server." in str(error) else "graph"
            said[role].add(str(error).removeprefix(repr(where)))
    for role, texts in said.items():
        (text,) = {re.sub(r"^.*?(?= is refused)", "", one) for one in texts}  # alike, whatever is there
        assert f"{role}.snapshot_roots" in text and str(root) in text
    assert [path.name for path in (outside / f".staging-a-{ID}").iterdir()] == []
    path = ours.cluster.snapshot(root / "runs", "a").result()
    assert ours.cluster.restore(path, replace=True).verify() == []
    (root / "newest").symlink_to(path)
    ours.cluster.restore(root / "newest", replace=True)
    np.testing.assert_array_equal(ours.cluster.table("t").pull(IDS), ROWS)
    assert ours.cluster.graph.describe().graphs[0].table == "t"
    with pytest.raises(SnapshotRefused, match=r"server\.snapshot_roots"):
        ours.cluster.snapshot(outside, "b").result()
    assert sorted(path.name for path in outside.iterdir()) == [f".staging-a-{ID}", "file"]


@pytest.mark.usefixtures("off_loopback")
def test_a_role_that_others_reach_and_that_has_no_roots_refuses_snapshots_and_serves_on(
    roles: Callable[..., Roles], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = roles()
    for role in ("server", "graph"):
        assert f"{role}.snapshot_roots is not set" in caplog.text
    for error in ours.refusals(str(tmp_path)):
        assert isinstance(error, SnapshotRefused)
        assert re.search(r"(server|graph)\.snapshot_roots, which is not set.*--snapshot-roots", str(error))
    with pytest.raises(SnapshotRefused, match=r"server\.snapshot_roots"):
        ours.cluster.snapshot(tmp_path, "a").result()
    assert list(tmp_path.iterdir()) == []
    ours.table.push(IDS, np.zeros((100, 8), np.float32))
    np.testing.assert_array_equal(ours.table.pull(IDS), ROWS)


def test_an_id_of_a_snapshot_is_32_hexadecimal_digits(roles: Callable[..., Roles], tmp_path: Path) -> None:
    ours = roles()
    for wrong in ("x", "", ID[1:], f"{ID}0", ID.replace("0", "g"), "A" * 32, f"{ID[:30]}/x", f"{ID}\n"):
        requests = [
            ("Freeze", shard_pb2.FreezeRequest(snapshot_id=wrong)),
            ("WriteFrozen", shard_pb2.WriteFrozenRequest(snapshot_id=wrong, folder=str(tmp_path))),
            ("Thaw", shard_pb2.ThawRequest(snapshot_id=wrong)),
        ]
        if wrong:
            requests.append(("Freeze", shard_pb2.FreezeRequest(snapshot_id=ID, parent_id=wrong)))
        errors = [ours.refusal(SHARD.name, method, request) for method, request in requests]
        write = graph_pb2.WriteGraphsRequest(folder=str(tmp_path / f".staging-a-{wrong}"), snapshot_id=wrong)
        errors.append(ours.refusal(GRAPH.name, "WriteGraphs", write))
        assert all("32 hexadecimal digits" in str(error) for error in errors), (wrong, errors)


@pytest.mark.parametrize("root", ["ftp://host/x", "reference://::file:///x", "s3://b/../c"])
def test_a_root_that_is_no_place_is_a_config_error(root: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.snapshot_roots"):
        ShardServer(ServerConfig(snapshot_roots=(root,)))


@pytest.mark.parametrize("address", ["unix:/run/docker.sock", "unix:7000", "dns://127.0.0.1/x:1", "", "host"])
def test_a_shard_is_not_registered_under_an_address_that_leads_elsewhere(
    address: str, served: Callable[..., ServedCluster]
) -> None:
    ours = served(1)
    with grpc.insecure_channel(ours.address) as channel, pytest.raises(grpc.RpcError) as caught:
        request = scheduler_pb2.RegisterRequest(address=address, incarnation=1)
        channel.unary_unary(f"/{SCHEDULER.name}/Register")(request.SerializeToString(), timeout=20)
    assert isinstance(caught.value, grpc.Call)
    assert repr(address) in str(caught.value.details())
    with pytest.raises(ConfigError):
        GrpcGearCarrier(address)
