"""Graph role: the graphs of a cluster behind gRPC."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import wait as wait_for
from contextlib import ExitStack
from pathlib import Path

import grpc

from geartrain.ams.graph.service.graphs import PROGRESS_SECONDS, Graphs, RowCluster
from geartrain.ams.graph.service.store import GraphStore
from geartrain.ams.observe.call_counts import call_metrics
from geartrain.ams.observe.metrics import Metric
from geartrain.ams.rpc.client.graph import download_chunks
from geartrain.ams.rpc.client.revoked import RevokedWatch
from geartrain.ams.rpc.ping import PingHandler
from geartrain.ams.rpc.server.binding import Call, Handlers, bind
from geartrain.ams.rpc.server.server import GrpcServer
from geartrain.ams.rpc.services import GRAPH
from geartrain.ams.storage.snapshot.roots import SnapshotRoots, checked_snapshot_id
from geartrain.ams.values.config import GraphConfig
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.graph_messages import (
    BuildGraph,
    BuildProgress,
    CancelBuild,
    DescribeGraphs,
    DownloadGraph,
    ForgetGraph,
    RestoreGraphs,
    SelectClasses,
    SelectedClasses,
    WriteGraphs,
)
from geartrain.ams.values.rpc import Ping


class GraphService:
    """Handlers of requests by their types."""

    def __init__(self, graphs: Graphs, roots: SnapshotRoots) -> None:
        self._graphs = graphs
        self._roots = roots
        self._ended = threading.Event()

        self.by_request: Handlers = {
            Ping: PingHandler("graph"),
            BuildGraph: self._build,
            CancelBuild: lambda request, _: graphs.cancel(request.table),
            SelectClasses: self._select,
            DescribeGraphs: lambda *_: graphs.describe(),
            DownloadGraph: self._download,
            ForgetGraph: lambda request, _: graphs.forget(request.table),
            WriteGraphs: self._write,
            RestoreGraphs: self._restore,
        }

    def abort_waits(self) -> None:
        """Abort calls that wait for a build: their clients call the next service."""
        self._ended.set()

    def _build(self, request: BuildGraph, call: Call) -> Iterator[BuildProgress]:
        build = self._graphs.start(request.table, request.k, step=request.step)
        while not wait_for([build.result], PROGRESS_SECONDS).done and call.servicer.is_active():
            self._require_serving(call)
            yield BuildProgress(building=build.state())
        if not build.result.done():
            return  # the caller left; the build goes on
        self._require_serving(call)
        built = build.result.result()
        yield BuildProgress(building=build.state())
        yield BuildProgress(built=built.graph, resumed_pairs=built.resumed_pairs)

    def _require_serving(self, call: Call) -> None:
        if self._ended.is_set():
            call.servicer.abort(grpc.StatusCode.UNAVAILABLE, "the graph service is ending")

    def _select(self, request: SelectClasses, _: Call) -> SelectedClasses:
        budget = min(request.budget, 2**63 - 1)
        ids, version = self._graphs.select_by(
            request.table, request.labels, budget, seed=request.seed, step=request.step, version=request.version
        )
        return SelectedClasses(version=version, ids=ids)

    def _download(self, request: DownloadGraph, _: Call) -> Iterator[bytes]:
        graph, info = self._graphs.load(request.table)
        return download_chunks(info, graph.offsets, graph.neighbours)

    def _write(self, request: WriteGraphs, call: Call) -> tuple[str, ...]:
        folder = self._roots.resolve(request.folder, call.user)
        snapshot_id = checked_snapshot_id("snapshot_id", request.snapshot_id)
        entries = self._graphs.write_snapshot(folder, snapshot_id, request.tables)
        return tuple(entry.model_dump_json() for entry in entries)

    def _restore(self, request: RestoreGraphs, call: Call) -> tuple[str, ...]:
        if len(request.incarnations) != len(request.tables):
            raise InvalidArgument(
                f"{len(request.tables)} tables are to have their graphs restored, with {len(request.incarnations)} "
                "incarnations; each table needs one"
            )
        tables = dict(zip(request.tables, request.incarnations, strict=True))
        return tuple(self._graphs.restore_snapshot(self._roots.resolve(request.folder, call.user), tables))


class GraphServer:
    """Server of the graph service: start, serve until stopped."""

    def __init__(self, config: GraphConfig, cluster: RowCluster) -> None:
        """Serve graphs of the rows of ``cluster``. Raises ConfigError."""
        self._config = config
        self._cluster = cluster
        self._roots = SnapshotRoots("graph", config.listen, config.snapshot_roots)
        self._server: GrpcServer | None = None
        self._graphs: Graphs | None = None
        self._on_stop = ExitStack()
        """Cleanup, in reverse order of the start."""
        self._grace_seconds = 0.0
        self._ended = threading.Event()
        self.stop_reason: str | None = None
        """Reason why it ended by itself: always None."""

    def start(self) -> str:
        """Bind and serve; return the address.

        Raises ConfigError (the port or the data folder is in use).
        """
        config = self._config
        store = builds = None
        try:
            if config.data is not None:
                # Imported only where it is used.
                from geartrain.ams.storage.kv.lmdb_file import lock_folder

                folder = Path(config.data)
                self._on_stop.callback(os.close, lock_folder(folder, "end that one, or give another folder"))
                store, builds = GraphStore(folder / "graphs"), folder / "builds"
            graphs = self._graphs = Graphs(self._cluster, store=store, builds=builds, memory_bytes=config.memory_bytes)
            self._on_stop.callback(graphs.close)
            service = GraphService(graphs, self._roots)
            server = self._server = GrpcServer(config.listen, config.max_message_bytes, reflection=config.reflection)
            server.add(bind(GRAPH, service.by_request))
            self._on_stop.callback(RevokedWatch(server.tokens, config.scheduler).close)
            self._on_stop.callback(lambda: server.stop(self._grace_seconds))
            self._on_stop.callback(service.abort_waits)
            server.start()
        except BaseException:
            self.stop(0)
            raise
        server.ready()
        return server.address

    def metrics(self) -> Iterator[Metric]:
        """Yield the metrics of its graphs and its port."""
        if (graphs := self._graphs) is not None and (server := self._server) is not None:
            yield from graphs.metrics()
            yield from call_metrics(((), counted) for counted in server.counts.read())

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Block until stopped; False if the time ran out first."""
        return self._ended.wait(timeout_seconds)

    def stop(self, grace_seconds: float = 5.0) -> None:
        """Finish the calls under way and stop. Builds end, too; with ``data`` set, progress is saved. Idempotent."""
        self._grace_seconds = grace_seconds
        self._on_stop.close()
        self._ended.set()
