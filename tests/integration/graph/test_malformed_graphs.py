"""What no client of ours sends to the graph service, or gets from it: refused by name, and the service goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.graph.service.role import GraphServer
from geartrain.ams.observe.failpoints import armed
from geartrain.ams.pb.v1 import graph_pb2
from geartrain.ams.rpc.client.graph import GrpcGraphCarrier, download_chunks
from geartrain.ams.rpc.services import GRAPH
from geartrain.ams.values.config import ClientConfig, GraphConfig
from geartrain.ams.values.errors import ProtocolError
from geartrain.ams.values.graph_messages import GraphBuilt, GraphInfo
from geartrain.launch.connected.graph_role import ConnectedCluster
from tests.integration.conftest import QUICK, ServedCluster

ROWS = np.random.default_rng(7).standard_normal((1500, 16)).astype(np.float32)
UNARY = ("CancelBuild", "SelectClasses", "DescribeGraphs", "ForgetGraph", "WriteGraphs", "RestoreGraphs")
INFO = GraphInfo(
    table="t", version=1, k=2, num_classes=3, step=0, writes=0, fingerprint="", built_unix_seconds=0.0, whole_bytes=56
)
OFFSETS, NEIGHBOURS = np.array([0, 2, 4, 6], np.int64), np.array([1, 2, 0, 2, 0, 1], np.int32)


@pytest.fixture
def role(served: Callable[..., ServedCluster]) -> Iterator[tuple[Cluster, grpc.Channel, str]]:
    address = served(1).address
    server = GraphServer(GraphConfig(listen="127.0.0.1:0"), ConnectedCluster(address, QUICK))
    listening = server.start()
    with gt.connect(address, config=ClientConfig(graph=listening)) as cluster, grpc.insecure_channel(listening) as way:
        table = cluster.create_table("faces", dim=16, num_rows=1500, optimizer=gt.SGD(0.1))
        table.assign(np.arange(1500), ROWS)
        yield cluster, way, listening
    server.stop(0)


def refusal(call: Any, data: bytes) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        reply = call(data, timeout=10)
        if not isinstance(reply, bytes):
            list(reply)
    return caught.value.code(), dict(caught.value.trailing_metadata()).get("geartrain-error", "")


def test_what_no_client_sends_is_refused_by_name(role: tuple[Cluster, grpc.Channel, str], tmp_path: Path) -> None:
    cluster, way, _ = role
    cluster.graph.build("faces", 3)
    unary = {name: way.unary_unary(f"/{GRAPH.name}/{name}") for name in UNARY}
    streams = [way.unary_stream(f"/{GRAPH.name}/{name}") for name in ("BuildGraph", "DownloadGraph")]
    for call in (*unary.values(), *streams):
        for garbage in (b"\xff" * 40, b"\x0a\xff\xff\xff\xff\x7f"):
            assert refusal(call, garbage) == (grpc.StatusCode.INVALID_ARGUMENT, "ProtocolError")
    select = graph_pb2.SelectClassesRequest
    for request, error in (
        (select(table="faces", budget=4, labels=b"1234567"), "ProtocolError"),
        (select(table="faces", labels=bytes(8)), "InvalidArgument"),
        (select(table="faces", budget=4, labels=b"\xff" * 8), "InvalidIds"),
        (select(table="", budget=4), "GraphNotFound"),
    ):
        assert refusal(unary["SelectClasses"], request.SerializeToString())[1] == error
    reply = unary["SelectClasses"](select(table="faces", budget=2**64 - 1, labels=bytes(8)).SerializeToString())
    assert len(graph_pb2.SelectClassesReply.FromString(reply).ids) == 8 * 1500
    without_id = graph_pb2.WriteGraphsRequest(folder=str(tmp_path))
    assert refusal(unary["WriteGraphs"], without_id.SerializeToString())[1] == "InvalidArgument"
    tables = [graph_pb2.GraphTable(table="faces", num_classes=1500)]
    elsewhere = graph_pb2.WriteGraphsRequest(folder=str(tmp_path), snapshot_id="x", tables=tables)
    assert refusal(unary["WriteGraphs"], elsewhere.SerializeToString())[1] == "InvalidArgument"
    assert list(tmp_path.iterdir()) == []
    unnumbered = graph_pb2.RestoreGraphsRequest(folder=str(tmp_path / "none"), tables=["faces"])
    assert refusal(unary["RestoreGraphs"], unnumbered.SerializeToString())[1] == "InvalidArgument"
    nowhere = graph_pb2.RestoreGraphsRequest(folder=str(tmp_path / "none"), tables=["faces"], incarnations=[1])
    assert refusal(unary["RestoreGraphs"], nowhere.SerializeToString())[1] == "SnapshotNotFound"
    assert cluster.graph.describe().graphs[0].version == 1


def download(messages: list[bytes], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """What a client makes of these messages."""
    carrier = GrpcGraphCarrier("127.0.0.1:1")
    monkeypatch.setattr(carrier, "stream", lambda *_: iter(messages))
    try:
        return carrier.download("t")
    finally:
        carrier.close()


def changed(message: bytes, **fields: Any) -> bytes:
    reply = graph_pb2.DownloadGraphReply.FromString(message)
    for name, value in fields.items():
        setattr(reply, name, value)
    return reply.SerializeToString()


def test_a_graph_that_comes_damaged_cut_or_too_long_is_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(download_chunks(INFO, OFFSETS, NEIGHBOURS))
    info, offsets, neighbours = download(whole, monkeypatch)
    assert info == INFO and offsets.tolist() == OFFSETS.tolist() and neighbours.tolist() == NEIGHBOURS.tolist()
    head, first, second = whole
    for messages, complaint in (
        ([], "did not say which graph"),
        ([first, second], "did not say which graph"),
        ([head, first], "without its last 24 bytes"),
        ([head, first, second, second], "24 bytes more than announced"),
        ([head, first, changed(second, checksum=1)], "came damaged"),
        ([head, first, second[:-1] + bytes([second[-1] ^ 1])], "came damaged"),
        ([changed(head, offsets_bytes=1 << 60), first, second], "bytes of offsets were announced"),
        ([changed(head, neighbours_bytes=1 << 60), first, second], "bytes of neighbours were announced"),
        ([changed(head, neighbours_bytes=23), first, second], "bytes of neighbours were announced"),
    ):
        with pytest.raises(ProtocolError, match=complaint):
            download(messages, monkeypatch)


def test_a_service_that_is_told_to_end_leaves_its_build_to_the_next(
    served: Callable[..., ServedCluster], tmp_path: Path
) -> None:
    address = served(1).address
    settings: dict[str, Any] = {"data": str(tmp_path), "memory_bytes": 220_000}
    server = GraphServer(GraphConfig(listen="127.0.0.1:0", **settings), ConnectedCluster(address, QUICK))
    listening = server.start()
    with gt.connect(address, config=ClientConfig(graph=listening)) as cluster:
        table = cluster.create_table("faces", dim=16, num_rows=1500, optimizer=gt.SGD(0.1))
        table.assign(np.arange(1500), ROWS)
        begun, outcome = threading.Event(), []
        with armed("graph.part.after=sleep(0.1)"):
            waiting = threading.Thread(
                target=lambda: outcome.append(
                    cluster.graph.build("faces", 5, progress=lambda it: it.done_pairs and begun.set())
                )
            )
            waiting.start()
            assert begun.wait(30)
            server.stop(1)
        server = GraphServer(GraphConfig(listen=listening, **settings), ConnectedCluster(address, QUICK))
        server.start()
        waiting.join(30)
        server.stop(0)
    (built,) = outcome
    assert isinstance(built, GraphBuilt) and built.resumed_pairs > 0
