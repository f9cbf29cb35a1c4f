"""Graphs of the class tables of one cluster: the service without its transport.

Builds run one after the other on threads of their own, since each uses all cores. Rows that change during a read give a
graph of a mixture of their versions; ``age_writes`` counts the writes since.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import xxhash

from geartrain.ams.graph.building.builder import DEFAULT_MEMORY_BYTES, BuiltGraph, build_graph
from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.ams.graph.building.rows import TableRows
from geartrain.ams.graph.client.calls import OnBuilding
from geartrain.ams.graph.service.snapshot_graphs import read_graph, write_graph
from geartrain.ams.graph.service.store import GraphStore, RowsVersion, graph_sizes
from geartrain.ams.observe.call_counts import WELL
from geartrain.ams.observe.metrics import Metric
from geartrain.ams.storage.snapshot.folder import open_snapshot
from geartrain.ams.storage.snapshot.manifest import FileEntry
from geartrain.ams.storage.snapshot.store import place
from geartrain.ams.values.errors import (
    Cancelled,
    GeartrainError,
    GraphNotFound,
    InternalError,
    InvalidArgument,
    SpecMismatch,
)
from geartrain.ams.values.graph_messages import GraphBuilding, GraphBuilt, GraphInfo, GraphsState
from geartrain.ams.values.specs import Ids

logger = logging.getLogger(__name__)

PROGRESS_SECONDS = 0.2
"""Interval of progress reports to the callers of a build."""


ClusterState = Any
"""Type of :class:`geartrain.ams.client.cluster_status.ClusterStatus`, which this package must not import."""


class RowCluster(Protocol):
    """Cluster whose rows graphs are built from."""

    def reading(self) -> AbstractContextManager[Any]:
        """Open a client to read rows for one build. Raises SchedulerUnavailable, ClusterNotReady."""

    def status(self) -> ClusterState:
        """Return its state, without retries. Raises Unavailable."""

    def table_incarnations(self) -> Mapping[str, int]:
        """Return its tables' incarnations by name: one request to the scheduler, no retries. Raises Unavailable."""

    def close(self) -> None:
        """Close connections that stay open between builds. Idempotent."""


class Graphs:
    """Graphs in this process, a :class:`geartrain.ams.graph.client.calls.GraphCalls`."""

    def __init__(
        self,
        cluster: RowCluster,
        *,
        store: GraphStore | None = None,
        builds: Path | None = None,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
    ) -> None:
        """Store graphs in ``store``, None: in memory alone; save builds in the folder ``builds``, None: nowhere.

        ``memory_bytes`` is that of :func:`build_graph`.
        """
        self._cluster = cluster
        self._store = store
        self._builds = builds
        self._memory_bytes = memory_bytes
        self._lock = threading.Lock()
        self._store_lock = threading.Lock()
        self._turn = threading.Lock()
        self._loaded: dict[str, tuple[NeighbourTable, RowsVersion]] = {}
        self._running: dict[str, Build] = {}
        self._ended: Counter[tuple[str, str]] = Counter()
        """Number of ended builds by table and outcome."""
        self._is_closed = False

    def start(self, table: str, k: int, *, step: int = 0) -> Build:
        """Start a build, or join the one under way. Raises InvalidArgument."""
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k < 2**31:
            raise InvalidArgument(f"k is {k!r}; it must be an integer from 1 to 2**31 - 1")
        incarnation = self._incarnations().get(table) if table in self._running else None
        with self._lock:
            running = self._running.get(table)
            if running is not None and incarnation is not None and running.is_of_another(incarnation):
                running.cancel()
            if running is not None and not running.is_cancelled:
                if (running.k, running.step) == (k, step):
                    return running
                raise InvalidArgument(
                    f"the graph of {table!r} is being built with k {running.k} of step {running.step}, not k {k} of "
                    f"step {step}; wait for it, or cancel it"
                )
            if self._is_closed:
                raise Cancelled("the graph service is ending; ask the next one")
            build = self._running[table] = Build(table, k, step)
        threading.Thread(target=self._run, args=(build,), name="geartrain-graph", daemon=True).start()
        return build

    def build(
        self,
        table: str,
        k: int,
        *,
        step: int = 0,
        progress: OnBuilding | None = None,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> GraphBuilt:
        if cancelled():
            raise Cancelled(f"building the graph of table {table!r} was cancelled before it began")
        build = self.start(table, k, step=step)
        try:
            for state in build.watch():
                if progress is not None:
                    progress(state)
                if cancelled():
                    build.cancel()
        except BaseException:  # Ctrl-C: no caller is left
            build.cancel()
            raise
        return build.result.result()

    def cancel(self, table: str) -> bool:
        with self._lock:
            build = self._running.get(table)
        if build is None:
            return False
        build.cancel()
        return True

    def select(self, table: str, labels: Ids, budget: int, *, seed: int, step: int, version: int | None = None) -> Ids:
        return self.select_by(table, labels, budget, seed=seed, step=step, version=version)[0]

    def select_by(
        self, table: str, labels: Ids, budget: int, *, seed: int, step: int, version: int | None
    ) -> tuple[Ids, int]:
        """Return the ids of :meth:`select`, and the version of the graph used."""
        graph, rows = self._find(table)
        if version is not None and version != rows.graph_version:
            raise SpecMismatch(
                f"the graph of {table!r} is version {rows.graph_version}, not {version}; load it, or ask for that one"
            )
        return graph.select(labels, budget, seed=seed, step=step), rows.graph_version

    def describe(self) -> GraphsState:
        state, incarnations = self._state(), self._incarnations()
        graphs = []
        for table in sorted({*self._loaded, *(() if self._store is None else self._store.tables())}):
            try:
                graph, rows = self._find(table, incarnations)
            except GeartrainError as exc:
                logger.warning("the graph of table %r: %s", table, exc)
                continue
            graphs.append(_with_age(_info(graph, rows), state))
        with self._lock:
            building = tuple(build.state() for build in self._running.values())
        return GraphsState(graphs=tuple(graphs), building=building)

    def metrics(self) -> Iterator[Metric]:
        """Yield the metrics of builds, and of the graphs in memory."""
        with self._lock:
            ended, building = dict(self._ended), [build.state() for build in self._running.values()]
        graphs = [_info(*loaded) for loaded in list(self._loaded.values())]
        yield Metric(
            "graph_builds_total", "counter", "Graph builds, by how they ended.", ("table", "code"), ended.items()
        )
        pairs = [
            ((build.table, kind), number)
            for build in building
            for kind, number in (("done", build.done_pairs), ("all", build.total_pairs))
        ]
        yield Metric("graph_build_pairs", "gauge", "Pairs of rows of a build under way.", ("table", "of"), pairs)
        for name, text, field in (
            ("graph_version", "Number of the table's graph: each build raises it.", "version"),
            ("graph_built_timestamp_seconds", "Unix time at which the table's graph was built.", "built_unix_seconds"),
            ("graph_classes", "Classes in the table's graph.", "num_classes"),
            ("graph_bytes", "Bytes of memory of the table's graph.", "whole_bytes"),
        ):
            yield Metric(name, "gauge", text, ("table",), [((info.table,), getattr(info, field)) for info in graphs])

    def load(self, table: str) -> tuple[NeighbourTable, GraphInfo]:
        graph, rows = self._find(table)
        return graph, _info(graph, rows)

    def forget(self, table: str) -> None:
        self.cancel(table)
        with self._store_lock:
            if self._store is not None:
                self._store.remove(table)
            self._loaded.pop(table, None)

    def write_snapshot(self, folder: str, snapshot_id: str, tables: Mapping[str, int]) -> list[FileEntry]:
        entries: list[FileEntry] = []
        for table, num_classes in tables.items():
            with contextlib.suppress(GraphNotFound):
                graph, rows = self._find(table)
                if graph.num_classes == num_classes:
                    entries += write_graph(folder, snapshot_id, graph, rows)
        return entries

    def restore_snapshot(self, folder: str, tables: Mapping[str, int]) -> list[str]:
        snapshot = open_snapshot(place(folder))
        state = self._state()
        restored = []
        for table, incarnation in tables.items():
            found = read_graph(snapshot, table)
            if found is None:
                self.forget(table)
                continue
            self.cancel(table)  # it has read rows from before the restore
            # Writes count on from the snapshot's, on each of the present shards.
            writes = (_writes(state, table) or 0) if state is not None else 0
            version = dataclasses.replace(found[1], table_version=writes, table_incarnation=incarnation)
            self._replace(found[0], version)
            restored.append(table)
        return restored

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            running = list(self._running.values())
        for build in running:
            build.cancel()
        wait_for([build.result for build in running])
        self._cluster.close()

    def _run(self, build: Build) -> None:
        outcome: GraphBuilt | BaseException
        try:
            outcome = self._built(build)
        except GeartrainError as exc:
            outcome = exc
        except MemoryError as exc:
            outcome = InvalidArgument(f"the graph of {build.table!r} with k {build.k} does not fit into memory: {exc}")
        except Exception as exc:  # a defect here must not leave a caller waiting for ever
            logger.exception("building the graph of %r", build.table)
            outcome = InternalError(f"building the graph of {build.table!r}: {exc!r}")
        with self._lock:
            if self._running.get(build.table) is build:
                del self._running[build.table]
            self._ended[build.table, type(outcome).__name__ if isinstance(outcome, BaseException) else WELL] += 1
        if isinstance(outcome, BaseException):
            logger.warning("table %r: the graph was not built: %s", build.table, outcome)
            build.result.set_exception(outcome)
        else:
            build.result.set_result(outcome)

    def _built(self, build: Build) -> GraphBuilt:
        with _held(self._turn, build.check), self._cluster.reading() as cluster:
            table = cluster.table(build.table)
            build.incarnation = table.spec.incarnation
            rows = TableRows(table)
            writes = _writes(self._cluster.status(), build.table) or 0
            folder = self._folder(build.table)
            built = build_graph(
                rows,
                build.k,
                memory_bytes=self._memory_bytes,
                progress=build.advance,
                cancelled=lambda: build.is_cancelled,
                resume=folder,
            )
            version = self._store_built(build, built, writes)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        info = _info(built.table, version)
        seconds = time.monotonic() - build.begun
        logger.info("table %r: graph version %d, k %d, built in %.1f s", info.table, info.version, info.k, seconds)
        return GraphBuilt(graph=_with_age(info, self._state()), resumed_pairs=built.resumed_pairs)

    def _store_built(self, build: Build, built: BuiltGraph, writes: int) -> RowsVersion:
        with contextlib.suppress(GeartrainError):  # none, or a damaged one: the new one counts from 1
            self._find(build.table, {build.table: build.incarnation})
        older = self._loaded.get(build.table)
        version = RowsVersion(
            table=build.table,
            table_version=writes,
            fingerprint=built.fingerprint,
            step=build.step,
            built_unix_seconds=time.time(),
            graph_version=1 if older is None else older[1].graph_version + 1,
            table_incarnation=build.incarnation,
        )
        self._replace(built.table, version, build.check)
        return version

    def _replace(self, graph: NeighbourTable, version: RowsVersion, check: Callable[[], None] = lambda: None) -> None:
        """Replace the older graph, unless ``check`` raises: a cancelled build must not undo a forget or a restore."""
        with self._store_lock:
            check()
            if self._store is not None:
                self._store.save(graph, version)
            self._loaded[version.table] = (graph, version)

    def _find(self, table: str, incarnations: Mapping[str, int] | None = None) -> tuple[NeighbourTable, RowsVersion]:
        """Return the graph of a table. ``incarnations``: current incarnation of each table; None: ask the cluster."""
        found = self._loaded.get(table)
        if found is None and self._store is not None:
            with self._store_lock:
                found = self._store.load(table)
                if found is not None:
                    self._loaded[table] = found
        if found is not None:
            incarnations = self._incarnations() if incarnations is None else incarnations
            if self._is_stale(found[1], incarnations.get(table, 0)):
                self._drop(table, found[1])
                found = None
        if found is None:
            raise GraphNotFound(
                f"there is no graph of table {table!r}; build it: cluster.graph.build({table!r}, k=...) or 'geartrain "
                f"graph build {table}'"
            )
        return found

    @staticmethod
    def _is_stale(rows: RowsVersion, incarnation: int) -> bool:
        """Return whether a graph is of another table than ``incarnation``, as far as both are known (0: not)."""
        return rows.table_incarnation != 0 and incarnation not in (0, rows.table_incarnation)

    def _drop(self, table: str, rows: RowsVersion) -> None:
        """Drop a graph of a table that is gone, unless it was replaced meanwhile."""
        with self._store_lock:
            held = self._loaded.get(table)
            if held is None or held[1] is not rows:
                return
            if self._store is not None:
                self._store.remove(table)
            del self._loaded[table]
        logger.info("table %r: its graph was of an earlier table of this name, and is dropped", table)

    def _incarnations(self) -> Mapping[str, int]:
        """Return the incarnations of the present tables; none while the cluster does not answer or know them."""
        try:
            return self._cluster.table_incarnations()
        except GeartrainError as exc:
            logger.debug("which tables there are is not known: %s", exc)
            return {}

    def _state(self) -> ClusterState | None:
        try:
            return self._cluster.status()
        except GeartrainError as exc:
            logger.debug("the age of graphs is not known: %s", exc)
            return None

    def _folder(self, table: str) -> Path | None:
        return None if self._builds is None else self._builds / xxhash.xxh3_128_hexdigest(table.encode())


class Build:
    """Build under way. Thread-safe."""

    def __init__(self, table: str, k: int, step: int) -> None:
        self.table, self.k, self.step = table, k, step
        self.begun = time.monotonic()
        self.incarnation = 0
        """Incarnation of the table that is read; 0: not open yet."""
        self.result: Future[GraphBuilt] = Future()
        self._pairs = (0, 0)
        self._cancelled = threading.Event()

    @property
    def is_cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self._cancelled.is_set()

    def is_of_another(self, incarnation: int) -> bool:
        """Return whether it reads the rows of another table of the name."""
        return self.incarnation not in (0, incarnation)

    def cancel(self) -> None:
        """Cancel it."""
        self._cancelled.set()

    def check(self) -> None:
        """Raise Cancelled if it was cancelled."""
        if self.is_cancelled:
            raise Cancelled(f"building the graph of table {self.table!r} was cancelled")

    def advance(self, done: int, total: int) -> None:
        """Record the number of compared pairs."""
        self._pairs = (done, total)

    def state(self) -> GraphBuilding:
        """Return its progress."""
        done, total = self._pairs
        seconds = time.monotonic() - self.begun
        return GraphBuilding(
            table=self.table, k=self.k, step=self.step, done_pairs=done, total_pairs=total, seconds=seconds
        )

    def watch(self) -> Iterator[GraphBuilding]:
        """Yield the state every PROGRESS_SECONDS until the build has ended, and once more then."""
        while not wait_for([self.result], PROGRESS_SECONDS).done:
            yield self.state()
        yield self.state()


@contextlib.contextmanager
def _held(turn: threading.Lock, check: Callable[[], None]) -> Iterator[None]:
    """Hold the turn during the block, once acquired, unless ``check`` raises meanwhile."""
    check()
    while not turn.acquire(timeout=PROGRESS_SECONDS):
        check()
    try:
        yield
    finally:
        turn.release()


def _info(graph: NeighbourTable, rows: RowsVersion) -> GraphInfo:
    return GraphInfo(
        table=rows.table,
        table_incarnation=rows.table_incarnation,
        version=rows.graph_version,
        k=graph.k,
        num_classes=graph.num_classes,
        step=rows.step,
        writes=rows.table_version,
        fingerprint=rows.fingerprint,
        built_unix_seconds=rows.built_unix_seconds,
        whole_bytes=graph.num_bytes,
    )


def _with_age(info: GraphInfo, state: ClusterState | None) -> GraphInfo:
    if state is None:
        return info
    sizes = graph_sizes(info.num_classes, info.k, [shard.num_buckets for shard in state.shards])
    writes = _writes(state, info.table)
    age = None if writes is None or writes < info.writes else writes - info.writes
    return dataclasses.replace(info, shard_bytes=sizes.shard_bytes, age_writes=age)


def _writes(state: ClusterState, table: str) -> int | None:
    return next((entry.writes for entry in state.tables if entry.name == table), None)


class OwnCluster:
    """Cluster in the same process, as a :class:`RowCluster`."""

    def __init__(self, cluster: Any) -> None:
        """``cluster`` is a :class:`geartrain.ams.client.cluster.Cluster`."""
        self._cluster = cluster

    def reading(self) -> AbstractContextManager[Any]:
        return contextlib.nullcontext(self._cluster)

    def status(self) -> ClusterState:
        return self._cluster.status()

    def table_incarnations(self) -> Mapping[str, int]:
        found: Mapping[str, int] = self._cluster.table_incarnations()
        return found

    def close(self) -> None:
        """Do nothing: the owner closes the cluster."""
