"""The graph role: its graphs behind gRPC."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any

import grpc

from geartrain.ams.graph.service.graphs import PROGRESS_SECONDS, Graphs, RowCluster
from geartrain.ams.graph.service.store import GraphStore
from geartrain.ams.pb.v1 import graph_pb2
from geartrain.ams.rpc import framing
from geartrain.ams.rpc.graph_client import GRAPH_SERVICE, building_to_pb, download_chunks, info_to_pb
from geartrain.ams.rpc.server import GrpcServer
from geartrain.ams.storage.kv.store import KeyValueStore, LockedStore
from geartrain.ams.storage.snapshot.roots import SnapshotRoots, checked_snapshot_id
from geartrain.ams.values.config import GraphConfig
from geartrain.ams.values.errors import InvalidArgument, StateDamaged

_LABELS = _IDS = 14


class GraphService:
    """Decodes, asks the graphs, encodes."""

    def __init__(self, graphs: Graphs, roots: SnapshotRoots) -> None:
        self._graphs = graphs
        self._roots = roots
        self._ended = threading.Event()

    @property
    def methods(self) -> dict[str, Any]:
        """The methods by name, from encoded request to encoded reply."""
        return {
            "CancelBuild": self.cancel_build,
            "SelectClasses": self.select_classes,
            "DescribeGraphs": self.describe_graphs,
            "ForgetGraph": self.forget_graph,
            "WriteGraphs": self.write_graphs,
            "RestoreGraphs": self.restore_graphs,
        }

    @property
    def streams(self) -> dict[str, Any]:
        """The methods that answer with several messages."""
        return {"BuildGraph": self.build_graph, "DownloadGraph": self.download_graph}

    def end(self) -> None:
        """Let go of those who wait for a build: they ask the next service."""
        self._ended.set()

    def build_graph(self, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        """Build, and tell how far it is."""
        request = framing.parse(data, graph_pb2.BuildGraphRequest)
        build = self._graphs.begin(request.table, request.k, step=request.step)
        while not wait_for([build.result], PROGRESS_SECONDS).done and context.is_active():
            if self._ended.is_set():
                context.abort(grpc.StatusCode.UNAVAILABLE, "the graph service is ending")
            yield graph_pb2.BuildGraphReply(building=building_to_pb(build.state())).SerializeToString()
        if not build.result.done():
            return  # nobody listens any more; the build goes on
        if self._ended.is_set():
            context.abort(grpc.StatusCode.UNAVAILABLE, "the graph service is ending")
        built = build.result.result()
        yield graph_pb2.BuildGraphReply(building=building_to_pb(build.state())).SerializeToString()
        last = graph_pb2.BuildGraphReply(built=info_to_pb(built.graph), resumed_pairs=built.resumed_pairs)
        yield last.SerializeToString()

    def cancel_build(self, data: bytes, _: grpc.ServicerContext) -> bytes:
        """End a build."""
        request = framing.parse(data, graph_pb2.CancelBuildRequest)
        return graph_pb2.CancelBuildReply(cancelled=self._graphs.cancel(request.table)).SerializeToString()

    def select_classes(self, data: bytes, _: grpc.ServicerContext) -> bytes:
        """Choose active classes."""
        request, raw = framing.decode_framed(data, graph_pb2.SelectClassesRequest)
        ids, version = self._graphs.select_by(
            request.table,
            framing.ids_from(raw.get(_LABELS)),
            min(request.budget, 2**63 - 1),
            seed=request.seed,
            step=request.step,
            version=request.version if request.HasField("version") else None,
        )
        return framing.encode_framed(graph_pb2.SelectClassesReply(version=version), [(_IDS, ids)])

    def describe_graphs(self, data: bytes, _: grpc.ServicerContext) -> bytes:
        """All graphs and builds."""
        framing.parse(data, graph_pb2.DescribeGraphsRequest)
        state = self._graphs.describe()
        return graph_pb2.DescribeGraphsReply(
            graphs=map(info_to_pb, state.graphs), building=map(building_to_pb, state.building)
        ).SerializeToString()

    def download_graph(self, data: bytes, _: grpc.ServicerContext) -> Iterator[bytes]:
        """Send a whole graph."""
        graph, info = self._graphs.load(framing.parse(data, graph_pb2.DownloadGraphRequest).table)
        yield from download_chunks(info, graph.offsets, graph.neighbours)

    def forget_graph(self, data: bytes, _: grpc.ServicerContext) -> bytes:
        """Drop a graph."""
        self._graphs.forget(framing.parse(data, graph_pb2.ForgetGraphRequest).table)
        return graph_pb2.ForgetGraphReply().SerializeToString()

    def write_graphs(self, data: bytes, _: grpc.ServicerContext) -> bytes:
        """Write graphs into a snapshot."""
        request = framing.parse(data, graph_pb2.WriteGraphsRequest)
        if not 1 <= request.num_shards <= 4096:
            raise InvalidArgument(f"num_shards is {request.num_shards}; it must lie in [1, 4096]")
        tables = {entry.table: entry.num_classes for entry in request.tables}
        folder = str(self._roots.resolve(request.folder))
        snapshot_id = checked_snapshot_id("snapshot_id", request.snapshot_id)
        entries = self._graphs.write_snapshot(folder, snapshot_id, tables, request.num_shards)
        return graph_pb2.WriteGraphsReply(files=[entry.model_dump_json() for entry in entries]).SerializeToString()

    def restore_graphs(self, data: bytes, _: grpc.ServicerContext) -> bytes:
        """Take graphs from a snapshot."""
        request = framing.parse(data, graph_pb2.RestoreGraphsRequest)
        if len(request.incarnations) != len(request.tables):
            raise InvalidArgument(
                f"{len(request.tables)} tables are to have their graphs restored, with {len(request.incarnations)} "
                "incarnations; each table needs one"
            )
        tables = dict(zip(request.tables, request.incarnations, strict=True))
        restored = self._graphs.restore_snapshot(str(self._roots.resolve(request.folder)), tables)
        return graph_pb2.RestoreGraphsReply(restored=restored).SerializeToString()


class GraphServer:
    """The graph service of a cluster: start, serve until stopped."""

    def __init__(self, config: GraphConfig, cluster: RowCluster) -> None:
        """Build graphs of the rows of ``cluster``. Raises ConfigError."""
        self._config = config
        self._cluster = cluster
        self._roots = SnapshotRoots("graph", config.listen, config.snapshot_roots)
        self._server: GrpcServer | None = None
        self._service: GraphService | None = None
        self._graphs: Graphs | None = None
        self._store: KeyValueStore | None = None
        self._ended = threading.Event()
        self.end_reason: str | None = None
        """Why it ended by itself: it never does."""

    def start(self) -> str:
        """Bind and serve; return the address.

        Raises ConfigError (the port or the data folder is in use), StateDamaged (names the key).
        """
        try:
            return self._start()
        except BaseException:
            self.stop(0)
            raise

    def _start(self) -> str:
        config = self._config
        store = builds = None
        if config.data is not None:
            # Loaded only where it is wanted.
            from geartrain.ams.storage.kv.lmdb_store import LmdbStore

            try:
                self._store = LockedStore(LmdbStore(config.data))
            except StateDamaged as exc:
                raise StateDamaged(
                    f"{exc}. (Here are graphs alone, which can be built again: move the folder away)"
                ) from exc
            store, builds = GraphStore(self._store), Path(config.data) / "builds"
        self._graphs = Graphs(self._cluster, store=store, builds=builds, memory_bytes=config.memory_bytes)
        self._service = GraphService(self._graphs, self._roots)
        self._server = GrpcServer(config.listen, config.max_message_bytes)
        self._server.add(GRAPH_SERVICE, self._service.methods, self._service.streams)
        self._server.start()
        self._server.ready()
        return self._server.address

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Block until stopped; False if the time ran out first."""
        return self._ended.wait(timeout_seconds)

    def stop(self, grace_seconds: float = 5.0) -> None:
        """Finish the calls under way and end; builds end too, what they had is kept. Idempotent."""
        steps: list[Callable[[], None]] = []
        if self._service is not None:
            steps.append(self._service.end)
        if self._server is not None:
            server = self._server
            steps.append(lambda: server.stop(grace_seconds))
        if self._graphs is not None:
            steps.append(self._graphs.close)
        if self._store is not None:
            steps.append(self._store.close)
        self._service = self._server = self._graphs = self._store = None
        for step in steps:
            step()
        self._ended.set()
