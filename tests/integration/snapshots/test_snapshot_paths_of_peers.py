"""What another process may say of snapshots: a place of a known kind, below the role's roots, and an id."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect
from geartrain.ams.graph.service.role import GraphServer
from geartrain.ams.observe.failpoints import armed
from geartrain.ams.pb.v1 import graph_pb2, scheduler_pb2, shard_pb2
from geartrain.ams.rpc.client.gear import GrpcGearCarrier
from geartrain.ams.rpc.services import GRAPH, SCHEDULER, SHARD
from geartrain.ams.server.role import ShardServer
from geartrain.ams.storage.snapshot import roots as snapshot_roots
from geartrain.ams.storage.snapshot.folder import open_snapshot
from geartrain.ams.storage.snapshot.manifest import Parent, encode_manifest
from geartrain.ams.values.config import ClientConfig, GraphConfig, ServerConfig
from geartrain.ams.values.errors import (
    ConfigError,
    GeartrainError,
    SnapshotDamaged,
    SnapshotFailed,
    SnapshotNotFound,
    SnapshotRefused,
    error_named,
)
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.launch.connected.graph_role import ConnectedCluster
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
        self.addresses = {SHARD.name: self.cluster.status().shards[0].address, GRAPH.name: listening}
        shard = stack.enter_context(grpc.insecure_channel(self.addresses[SHARD.name]))
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
        (text,) = {re.sub(r"^.*?(?= is refused)", "", text) for text in texts}  # alike, whatever is there
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


def swap(folder: Path, outside: Path) -> None:
    """Put a link to a folder outside in the place of one that was looked at already."""
    folder.rename(folder.with_name(f"{folder.name}.was"))
    folder.symlink_to(outside)


def when_begun(
    pool: ThreadPoolExecutor, work: Callable[[], Any], passes: Any, place: str, then: Callable[[], None]
) -> Any:
    """What becomes of ``work`` if ``then`` happens where it waits."""
    done = pool.submit(work)
    while not passes.fired[place]:
        assert not done.done(), done.result()
    then()
    return done.exception(60)


@pytest.mark.parametrize("has_roots", [True, False])
def test_a_folder_that_becomes_a_link_leads_nowhere(
    roles: Callable[..., Roles], tmp_path: Path, has_roots: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_roots:
        monkeypatch.setattr(snapshot_roots, "is_loopback", lambda _: False)
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    ours = roles(*([str(root)] if has_roots else []))
    kept = ours.cluster.snapshot(root, "kept").result(60)
    with ThreadPoolExecutor(1) as pool, armed(f"block.write.before=pause({tmp_path / 'write'})") as passes:

        def write() -> None:
            (staging,) = root.glob(".staging-*")
            swap(staging, outside)
            (tmp_path / "write").touch()

        error = when_begun(pool, ours.cluster.snapshot(root, "a").result, passes, "block.write.before", write)
        assert isinstance(error, SnapshotFailed), error
    assert list(outside.iterdir()) == []
    copy = outside / "copy"
    shutil.copytree(kept, copy)
    with ThreadPoolExecutor(1) as pool, armed(f"restore.block.before=pause({tmp_path / 'read'})") as passes:

        def read() -> None:
            swap(Path(str(kept)), copy)
            (tmp_path / "read").touch()

        restoring = lambda: ours.cluster.restore(kept, replace=True)  # noqa: E731
        error = when_begun(pool, restoring, passes, "restore.block.before", read)
        assert isinstance(error, SnapshotDamaged | SnapshotNotFound), error


_AS_ANOTHER_USER = """
import encodings.idna, os, socket, sys, threading
os.setgid(65534)
os.setuid(65534)
def carry(one, other):
    while data := one.recv(65536):
        other.sendall(data)
    other.shutdown(socket.SHUT_WR)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
while True:
    near, far = listener.accept()[0], socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    for pair in ((near, far), (far, near)):
        threading.Thread(target=carry, args=pair, daemon=True).start()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a process of another user")
def test_another_user_of_the_machine_names_no_folder(roles: Callable[..., Roles], tmp_path: Path) -> None:
    ours = roles()
    path = ours.cluster.snapshot(tmp_path, "a").result(60)
    (staging := tmp_path / f".staging-b-{ID}").mkdir()
    with contextlib.ExitStack() as stack:
        for service, address in ours.addresses.items():
            proxy = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _AS_ANOTHER_USER, address.rpartition(":")[2]],
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.callback(proxy.communicate)
            stack.callback(proxy.kill)
            assert proxy.stdout is not None
            port = int(proxy.stdout.readline())
            ours._ways[service] = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}"))
        for folder in (str(path), str(staging)):
            for error in ours.refusals(folder):
                assert isinstance(error, SnapshotRefused)
                assert re.search(r"is of user 65534, and user 0 runs this .*(server|graph)\.snapshot_roots", str(error))
    assert list(staging.iterdir()) == []


def test_a_snapshot_adds_to_none_that_lies_elsewhere(roles: Callable[..., Roles], tmp_path: Path) -> None:
    ours = roles()
    root = tmp_path / "root"
    ours.cluster.snapshot(root, "a").result(60)
    ours.table.push(IDS[:3], np.ones((3, 8), np.float32))
    path = Path(str(ours.cluster.snapshot(root, "b", parent="a").result(60)))
    (tmp_path / "elsewhere").mkdir()
    (root / "a").rename(tmp_path / "elsewhere" / "a")
    manifest = open_snapshot(path).manifest
    assert manifest.parent is not None
    parent = Parent.model_construct(name="../elsewhere/a", id=manifest.parent.id)
    (path / "manifest.json").write_bytes(encode_manifest(manifest.model_copy(update={"parent": parent})))
    with pytest.raises(SnapshotDamaged, match=r"parent.*\.\./elsewhere/a"):
        ours.cluster.restore(path, replace=True)
    assert isinstance(ours.refusals(str(path))[1], SnapshotDamaged)


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
