"""Client of a cluster: its tables, their snapshots and exports, and the jobs that write them."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, Unpack

from geartrain.ams.client.cluster_status import ClusterStatus, describe_cluster
from geartrain.ams.client.data_streams import DataStreams
from geartrain.ams.client.event_reporter import EventReporter
from geartrain.ams.client.job_reporter import JobReporter
from geartrain.ams.client.jobs.worker_steps import JobSteps, worker_name
from geartrain.ams.client.other_roles import embedded_graphs, remote_gears, remote_graphs
from geartrain.ams.client.scheduler_calls import SNAPSHOT_SECONDS, SchedulerCalls
from geartrain.ams.client.shard_calls import ShardCalls, all_of
from geartrain.ams.client.snapshots.restore import restore_snapshot
from geartrain.ams.client.snapshots.snapshot import JobContents, PendingSnapshot, free_name, start_snapshot
from geartrain.ams.client.snapshots.table_export import PendingExport, start_export
from geartrain.ams.client.table import Table
from geartrain.ams.client.writes import ClientStream, checked_incarnation
from geartrain.ams.rpc.carrier import AttemptFailed, SchedulerCarrier, ShardCarrier
from geartrain.ams.storage.snapshot.folder import Snapshot
from geartrain.ams.storage.snapshot.store import place
from geartrain.ams.values.admission.rules import Admission
from geartrain.ams.values.arguments import checked_name, integer
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import (
    GeartrainError,
    GraphUnavailable,
    InvalidArgument,
    SchedulerUnavailable,
    SnapshotRefused,
)
from geartrain.ams.values.expiry.rules import Expiry
from geartrain.ams.values.gear_messages import Freshness
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.scheduler_messages import ClusterEvent, ClusterView, JobReport, JobWorker, RestoreOrder
from geartrain.ams.values.shard_messages import Fence, Restore
from geartrain.ams.values.specs import (
    DTYPES,
    DTypeName,
    Initializer,
    Normal,
    TableSettings,
    TableSpec,
    checked_wire_dtype,
)
from geartrain.ams.values.text import quoted

if TYPE_CHECKING:
    from geartrain.ams.gear.client.remote import RemoteGears
    from geartrain.ams.graph.client.calls import GraphCalls

logger = logging.getLogger(__name__)

_LONGEST_TOLD = 500
"""Most characters of a text in an event that the scheduler accepts."""


class LaterWrites(Protocol):
    """Writes that another component sends in the background."""

    def wait(self) -> None:
        """Wait until none is in flight. Raises the first error that was not raised yet."""


class Cluster:
    """Tables on the shards of a cluster. Thread-safe; close it, or use it as a context manager."""

    def __init__(
        self,
        scheduler: SchedulerCarrier,
        view: ClusterView,
        open_carrier: Callable[[str, int], ShardCarrier],
        config: ClientConfig,
        *,
        stream: ClientStream,
        remote: bool,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._open_carrier = open_carrier
        self._config = config
        self._calls = ShardCalls(view, open_carrier, lambda: self._scheduler.describe(), config, remote=remote)
        self._scheduler = SchedulerCalls(scheduler, self._calls, stream)
        self._graph: GraphCalls | None = None
        self._opening = threading.Lock()
        self._stream = stream
        self._close = close
        self._closed = False
        self._later_writes: weakref.WeakSet[LaterWrites] = weakref.WeakSet()
        self._job_reporters: list[JobReporter] = []
        self._job_steps: weakref.WeakSet[JobSteps] = weakref.WeakSet()
        self._stream_readers: dict[JobWorker, DataStreams] = {}
        self._events = EventReporter(scheduler)
        if stream.is_named:
            # Only a process that continues under this name has a use for the dedup state of numbered writes.
            try:
                self._fence(stream.name, stream.incarnation, forget=False)
                self._fence(stream.unnumbered, stream.incarnation, forget=True)
            except BaseException:
                self._calls.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and not issubclass(kind, Exception) and not self._calls.is_forked:
            self.cancel_waits()  # after Ctrl-C or an exit no background call waits for a dead shard any longer
        if kind is not None and not self._calls.is_forked:
            try:
                self._finish_writes()
            except GeartrainError as exc:  # the error that ended the block is the one to raise
                logger.warning("writes in the background were not applied: %s", exc)
        self.close()

    @property
    def num_shards(self) -> int:
        """Number of shards of the cluster."""
        return self._calls.view.num_shards

    @property
    def write_stream(self) -> ClientStream:
        """Name and incarnation under which this process writes, as set by :func:`connect`."""
        return self._stream

    @property
    def graph(self) -> GraphCalls:
        """Nearest classes of every class of a table: ``cluster.graph.build("faces", k=32)``, ``.select(...)``.

        With :func:`local` it is in this process, made on first use; with :func:`connect` it is the graph service that
        ``client.graph`` names. Raises ConfigError without one.
        """
        with self._opening:
            if self._graph is None:
                self._graph = remote_graphs(self._config) if self._calls.remote else embedded_graphs(self)
            return self._graph

    @property
    def graph_service(self) -> GraphCalls | None:
        """:attr:`graph` if it is another process; None: build graphs where they are used."""
        return self.graph if self._calls.remote and self._config.graph is not None else None

    @property
    def _graphs_of_tables(self) -> GraphCalls | None:
        """Graphs of the cluster's tables; None: there are none."""
        service = self.graph_service
        return self._graph if service is None else service

    def slow_gears(self, name: str, *, dim: int, wait: bool, freshness: Freshness) -> RemoteGears:
        """Return the client of the slow gears that serve the dense part ``name``: processes of ``geartrain slowgear``,
        found through the scheduler. Raises InvalidArgument, GearUnavailable.
        """
        if not self._calls.remote:
            raise InvalidArgument(
                f"this cluster is embedded in the process and has no slow gears of {name!r}; give build= and samples=, "
                "or connect() to a cluster"
            )
        streams = partial(self.streams, worker="fast gear")
        return remote_gears(name, dim, streams, self._config, wait=wait, freshness=freshness)

    def create_table(
        self,
        name: str,
        *,
        dim: int,
        optimizer: RowOptimizerSpec,
        num_rows: int | None = None,
        initializer: Initializer | None = None,
        seed: int = 0,
        dtype: DTypeName = "float32",
        slot_dtype: DTypeName = "float32",
        admission: Admission | None = None,
        expiry: Expiry | None = None,
        max_bytes: int | None = None,
        reuse: bool = False,
        wire_dtype: DTypeName | None = None,
    ) -> Table:
        """Make a table on every shard and return it.

        Args:
            name: Name of the table.
            dim: Width of a row.
            optimizer: Applied on the shards.
            num_rows: Ids are 0 ... num_rows - 1; None: any id >= 0.
            initializer: First values of a row; None: normal, std 0.01.
            seed: Seed of the initializer.
            dtype: Storage type of the rows: float32, float16 or bfloat16.
            slot_dtype: Storage type of the optimizer's state of each row.
            admission: Which new ids get a row at a push: ``gt.MinCount(3)``, ``gt.Probability(0.1)``; None:
                every id. Gradients of the others are dropped, and counted.
            expiry: Which rows are removed by age or rule; None: none.
            max_bytes: Memory for all rows of a hashed table, slots and index included; each shard has its
                share, by its buckets. When new rows need room, the least frequently pushed rows are evicted, of these
                the least recently pushed. None: no limit.
            reuse: Open the table if it exists. It keeps the settings that :meth:`alter_table` changes, and a warning
                names those that differ from these; modules made on it still train by ``optimizer``.
            wire_dtype: Type of rows sent to and from this process, as in :meth:`table`.

        Raises:
            TableExists: The name is taken, and not ``reuse``: a script that runs twice never trains on old rows
                by accident.
            SpecMismatch: The table exists, and differs in settings that cannot be altered.
        """
        spec = TableSpec(
            name=name,
            dim=dim,
            optimizer=optimizer,
            num_rows=num_rows,
            initializer=Normal() if initializer is None else initializer,
            seed=seed,
            dtype=dtype,
            slot_dtype=slot_dtype,
            admission=admission,
            expiry=expiry,
            max_bytes=max_bytes,
        )
        if spec.is_scaled:
            raise InvalidArgument(
                f"dtype is {dtype!r} and slot_dtype {slot_dtype!r}: only rows on ranks may have 8 bits (rows='ranks'); "
                f"rows and slots in a cluster are one of {', '.join(map(repr, DTYPES))}"
            )
        checked_wire_dtype(wire_dtype, name, dtype)  # before there is a table
        made = self._scheduler.create_table(spec, reuse=reuse)
        return Table(made, self._calls, self._stream, wire_dtype, optimizer)

    def table(self, name: str, *, wire_dtype: DTypeName | None = None) -> Table:
        """Return an existing table.

        With ``wire_dtype="bfloat16"`` or ``"float16"`` pulled rows and pushed gradients of a float32 table are sent in
        16 bits: half the bytes, rounded to the nearest. The choice is this client's, not the table's.

        Raises TableNotFound, TableBeingRestored, ShardRestarted (a shard has lost its part of the table),
        ClusterNotReady (shards that have not registered yet may have it), InvalidArgument.
        """
        return Table(self._scheduler.table(name), self._calls, self._stream, wire_dtype)

    def alter_table(self, name: str, **settings: Unpack[TableSettings]) -> Table:
        """Change settings of an existing table on every shard, while it is read and written; return it.

        ``cluster.alter_table("t", max_bytes=8 << 30, expiry=gt.Unseen(steps=100_000))``. Settings are ``optimizer``
        (other numbers of the same kind), ``initializer`` (of rows not yet created), ``admission``, ``expiry`` and
        ``max_bytes``, as in :meth:`create_table`; settings left out stay. Other processes receive them with their next
        call. Pushes of heads, groups and dense modules carry the numbers of their own optimizers. Later snapshots and
        exports have the new settings, and a restore in the table's place keeps them.

        Raises TableNotFound, InvalidArgument (not alterable), OutOfMemory, Busy (a snapshot of it is being written);
        then nothing has changed. After ShardUnavailable or SchedulerUnavailable some shards may have the new settings:
        call it again. Raises also ClusterNotReady, ShardRestarted.
        """
        return Table(self._scheduler.alter_table(name, settings), self._calls, self._stream)

    def table_incarnations(self) -> dict[str, int]:
        """Return the incarnation of each table by name, which differs from earlier and later tables of its name. One
        RPC."""
        return {spec.name: spec.incarnation for spec in self._scheduler.describe().tables}

    def drop_table(self, name: str) -> None:
        """Remove a table and its rows from every shard, and its graph. Idempotent.

        If a graph service does not answer, that is logged only: its graph is of rows that are gone.
        """
        if not isinstance(name, str):
            raise InvalidArgument(f"table name {quoted(name)} must be a string")
        self._scheduler.drop_table(name)
        if (graphs := self._graphs_of_tables) is not None:
            try:
                graphs.forget(name)
            except GraphUnavailable as exc:
                logger.warning("the graph of table %r was not dropped: %s", name, exc)

    def fence(self, job: str, incarnation: int, *, forget: bool = True) -> None:
        """Fence off a job's earlier runs: every shard refuses writes of streams named ``job`` or ``job/…`` with a lower
        incarnation (StaleClient), and the scheduler ends their leases of data streams. Idempotent; one RPC per shard
        and one to the scheduler.

        ``forget`` (for a job that returns to a snapshot) also forgets which of their writes were applied, and the steps
        of their sync groups, so that numbers may be used again; a job that goes on passes False. A restarted shard
        loses fences with its rows. Raises StaleClient (a higher incarnation exists), SchedulerUnavailable,
        ShardUnavailable (some shards may have the fence).
        """
        name, incarnation = checked_name("job", job), checked_incarnation(incarnation)
        self._scheduler.fence_job(name, incarnation)
        self._fence(name, incarnation, forget=forget)

    def _fence(self, job: str, incarnation: int, *, forget: bool) -> None:
        all_of(self._calls.on_all_shards(Fence(job=job, incarnation=incarnation, forget=forget)))

    def streams(
        self,
        job: str,
        *,
        worker: str,
        num_streams: int = 64,
        num_workers: int = 1,
        incarnation: int | None = None,
        data: str = "",
        restore: RestoreOrder | None = None,
    ) -> DataStreams:
        """Return the data streams of ``job`` for ``worker`` to lease: each of ``num_streams`` parts of the data is read
        by one worker at a time, and resumes where it was committed, whatever the number of workers.

        The streams are divided evenly among the workers that hold a lease; during the first lease, among
        ``num_workers``. ``incarnation`` is by default that of :func:`connect`. ``data`` names the data: a worker that
        leases with another name than the job's is refused. With ``restore`` the scheduler saves the job, and restores
        it when it has lost rows or a worker. Raises InvalidArgument.
        """
        if restore is not None:
            restore = dataclasses.replace(restore, root=str(place(restore.root)), tables=tuple(restore.tables))

        return DataStreams(
            self._scheduler.carrier,
            checked_name("job", job),
            checked_name("worker", worker),
            self._stream.incarnation if incarnation is None else checked_incarnation(incarnation),
            num_streams=integer("num_streams", num_streams, 1),
            num_workers=integer("num_workers", num_workers, 1),
            data="" if not data else checked_name("data", data),
            restore=restore,
            timeout_seconds=self._config.attempt_timeout_seconds,
            patience_seconds=self._config.recovery_timeout_seconds,
            latest=self._stream_readers,
            reopen=self.reopen,
            finish_writes=self._finish_writes,
            check_caller=self._scheduler.check_caller,
        )

    def job_steps(self, job: str, *, worker: str | None = None) -> JobSteps:
        """Return the step counter of ``worker`` among the other workers of ``job``; the first
        :meth:`~geartrain.ams.client.jobs.worker_steps.JobSteps.join` registers it.

        The name of ``worker`` is by default that of :func:`connect`'s stream, else host and process id; closing the
        cluster unregisters it. Raises InvalidArgument.
        """
        checked_name("job", job)
        stream = self._stream
        name = worker_name(job, stream.name if stream.is_named else None) if worker is None else worker
        who = JobWorker(job, checked_name("worker", name), stream.incarnation)
        steps = JobSteps(self._scheduler.carrier, who, self._config)
        self._job_steps.add(steps)
        return steps

    def report_job(self, job: str, report: Callable[[], JobReport] = JobReport) -> JobReporter | None:
        """Register ``job`` as training from now on, and return a watch of shards that want to leave; None: embedded
        shards end with this process.

        A server that is shutting down waits until such jobs have taken a snapshot and are done. ``report`` is called
        about once a second on another thread, and returns the job's entry in ``geartrain status``.
        """
        if not self._calls.remote:
            return None
        watch = JobReporter(self._scheduler.carrier, checked_name("job", job), self._stream.incarnation, report)
        self._job_reporters.append(watch)
        return watch

    def acknowledge(self, sequence: int) -> None:
        """Declare that no write numbered below ``sequence`` will be sent again, by this process or its successor.

        Shards keep dedup entries for the 1,024 sequence numbers from ``sequence`` on. They drop entries of lower
        numbers at the next numbered write to a table.
        """
        self._stream.acknowledge(sequence)

    def status(self) -> ClusterStatus:
        """Return the state of the cluster. A shard that does not answer is described by the scheduler alone."""
        self._calls.require_usable()
        try:
            return describe_cluster(self._scheduler.carrier, self._open_carrier)
        except AttemptFailed as exc:
            raise SchedulerUnavailable(str(exc)) from None

    def snapshot(
        self,
        root: str | Path,
        name: str | None = None,
        *,
        step: int = 0,
        values: Mapping[str, Any] | None = None,
        files: Mapping[str, bytes] | None = None,
        tables: Sequence[str] | None = None,
        parent: str | Path | None = None,
        graphs: bool = True,
        when_frozen: Callable[[], None] = lambda: None,
    ) -> PendingSnapshot:
        """Begin a snapshot of the tables' present state in the folder ``root``/``name`` (by default
        ``step-000000042``, or ``step-000000042-2`` if that exists from an earlier run).

        ``root`` is a local folder or a URL (``s3://bucket/runs/1``; also gs, abfs and hdfs).

        Returns once every shard has frozen its state; training continues while the files are written, and ``.result()``
        waits until the snapshot is complete. It contains every write acknowledged before the call; writes in flight may
        be on some shards only, so call it at a step boundary. ``values`` (JSON) and ``files`` store the job's own state
        with it. ``root`` must mean the same folder here and on every shard.
        ``tables`` are the names of those to write; None: all. A shard freezes a table for one snapshot at a time: a
        second one of the same table ends the first, one of other tables does not.
        With ``parent``, an earlier snapshot of the same root, only rows written since are stored, and a restore needs
        the parent. A shard tracks writes since the last few completed snapshots of a table, and since the one it was
        restored from: if the parent is none of them, it writes the whole table.
        Unless ``graphs`` is false, the tables' graphs in :attr:`graph` are included, as they are when written. If a
        graph service does not answer, that is logged only: a graph can be built again.
        ``when_frozen`` is called once every shard has frozen its state: if ``values`` are outdated by then, it raises
        an error, and there is no snapshot.
        Raises InvalidArgument, TableNotFound, SnapshotNotFound or SnapshotDamaged (of the parent), SnapshotFailed (also
        if ``name`` exists), SnapshotRefused (a server does not write there: ``snapshot_roots``), ShardUnavailable,
        StaleClient (of a named stream that was taken over).
        """
        self._finish_writes()
        job = JobContents(step=integer("step", step, 0), values=values or {}, files=files or {})
        name = free_name(root, job.step) if name is None else name
        began = time.monotonic()
        try:
            pending = start_snapshot(
                self._calls,
                lambda: self._scheduler.describe(SNAPSHOT_SECONDS),
                root,
                name,
                job,
                tables=tables,
                parent=parent,
                caller=self._stream.caller,
                check_caller=self._scheduler.check_caller,
                when_frozen=when_frozen,
                graphs=self._graphs_of_tables if graphs else None,
            )
        except GeartrainError as exc:
            self._report_snapshot(name, tables, job.step, began, exc)
            raise
        hold, where = time.monotonic() - began, str(pending.path)
        pending.when_done(lambda error: self._report_snapshot(where, tables, job.step, began, error, hold))
        return pending

    def require_snapshot_root(self, root: str | Path) -> None:
        """Raise SnapshotRefused if a shard may not write snapshots below ``root`` (``snapshot_roots``). To be called
        before there are any. One RPC to each."""
        asked = Restore(folder=f"{place(root)}/any", tables=())  # only checks whether one exists
        for outcome in self._calls.on_all_shards(asked, caller=self._stream.caller):
            if isinstance(outcome, SnapshotRefused):
                raise outcome

    def _report_snapshot(
        self,
        where: str,
        tables: Sequence[str] | None,
        step: int,
        began: float,
        error: BaseException | None,
        hold_seconds: float = 0.0,
    ) -> None:
        """Report a complete or failed snapshot to the scheduler, unless the caller alone caused the failure."""
        if isinstance(error, InvalidArgument):
            return
        seconds = time.monotonic() - began
        said = f"snapshot of step {step:,} is whole after {seconds:.1f} s: {where}"
        self._report_event(
            ClusterEvent(
                kind="snapshot" if error is None else "snapshot_failed",
                text=said if error is None else f"no snapshot of step {step:,}: {error}",
                tables=tuple(tables or ()),
                step=step,
                snapshot=where,
                seconds=seconds,
                hold_seconds=hold_seconds,
                reason="" if error is None else type(error).__name__,
            )
        )

    def _report_event(self, event: ClusterEvent) -> None:
        """Send the scheduler an event of this client's job, if it has one, such as of its stream ``job/rank0``."""
        if self._calls.remote:
            job = self._stream.name.rpartition("/")[0] or self._stream.name if self._stream.is_named else ""
            texts = {field: getattr(event, field)[:_LONGEST_TOLD] for field in ("text", "snapshot")}
            # a path may have surrogates
            short = {field: text.encode(errors="replace").decode() for field, text in texts.items()}
            self._events.report(dataclasses.replace(event, job=job, **short))

    def export(self, tables: str | Sequence[str], root: str | Path, *, since: int | None = None) -> PendingExport:
        """Begin to write the tables' present rows, without the optimizer's state, as the next version in the folder or
        URL ``root``, for followers (:class:`.TableFollower`).

        ``tables`` is a name, a pattern (``"ctr/*"``) or several of them; a version is one moment of all, as a snapshot
        is. Returns once every shard has frozen it. The first version is a base; later ones hold rows written since the
        previous one, or since version ``since`` (0: a base). A shard that does not know those (it was restarted, or
        versions and snapshots came between) writes all rows. ``root`` must mean the same folder here and on every
        shard. Waits up to ``recovery_timeout_seconds`` for snapshots and other exports of the same tables; a snapshot
        that begins meanwhile ends this export (SnapshotSuperseded). Raises TableNotFound, InvalidArgument (also for a
        table whose untouched rows move), Busy, SnapshotNotFound (there is no version ``since``), SnapshotFailed,
        SnapshotRefused, ShardUnavailable.
        """
        return start_export(
            self._calls,
            self._scheduler.describe,
            tables,
            root,
            since=since,
            caller=self._stream.caller,
            check_caller=self._scheduler.check_caller,
        )

    def restore(self, path: str | Path, *, tables: Sequence[str] | None = None, replace: bool = False) -> Snapshot:
        """Create the tables of the snapshot in the folder ``path``, with rows and slots; return the snapshot.

        The number of shards may differ from that of the snapshot; ``tables`` are the names to restore, None: all. All
        or nothing: until every row is there, opening, reading or writing the tables raises TableBeingRestored, and
        after a failure none of them stays. Tables of a process that died meanwhile are listed as incomplete; a restore
        in their place starts anew. With ``replace=True`` (a job that goes back) tables of these names are dropped
        first, but only after every byte of the snapshot was verified; each restored table keeps the altered settings
        (:meth:`alter_table`) of the one it replaces, and a warning says so. Objects of this process continue with the
        restored rows: tables, and heads of one process; a dense module after ``refresh()``. Heads of several ranks and
        slow gears must be made anew. Other processes must open their tables anew (:meth:`table`): until then they get
        TableNotFound, so that they cannot write into restored rows. A write already in the restored rows is
        deduplicated if it is sent again (exactly on the same number of shards, at a step boundary on another), and sync
        groups continue at their step. Raises TableExists (a job never continues with other rows by accident),
        TableNotFound (``tables`` names one that the snapshot lacks), SnapshotNotFound, SnapshotRefused (a server does
        not read there: ``snapshot_roots``), SnapshotDamaged (naming the file; checked before any of its rows is
        written), ShardUnavailable, SchedulerUnavailable. Once the tables are open, graphs are restored to
        :attr:`graph`, if it was used or is a service.
        """
        began = time.monotonic()
        restored = restore_snapshot(
            self._calls,
            path,
            self._scheduler,
            tables=tables,
            replace=replace,
            caller=self._stream.caller,
            # An embedded cluster restores the graphs even if it has not been asked for any yet.
            graphs=lambda some: self.graph if some and not self._calls.remote else self._graphs_of_tables,
        )
        seconds, step = time.monotonic() - began, restored.manifest.step
        self._report_event(
            ClusterEvent(
                kind="restore",
                text=f"restored in {seconds:.1f} s from {restored.path}, which is of step {step:,}",
                tables=tuple(tables or (str(spec["name"]) for spec in restored.manifest.tables)),
                step=step,
                snapshot=str(restored.path),
                seconds=seconds,
            )
        )
        return restored

    def reopen(self, names: Sequence[str]) -> None:
        """Continue with tables that another process has restored, as if this one had: its open tables mean the restored
        ones, on the present shards. One RPC for each, and one more. Raises as :meth:`table`.
        """
        restored = [self._scheduler.table(name) for name in names]
        self._calls.adopt(self._scheduler.describe())
        self._calls.restored(restored)

    def wait_for(self, writes: LaterWrites) -> None:
        """Let snapshots, and closing, wait for these later writes, while the caller holds a reference to them."""
        self._later_writes.add(writes)

    def _finish_writes(self) -> None:
        for writes in list(self._later_writes):
            writes.wait()

    def close(self) -> None:
        """Finish background work and close connections; an embedded cluster ends with its rows. Idempotent.

        After Ctrl-C the ``with`` block does not wait: background work fails with Unavailable. In a forked child, which
        cannot use the cluster, it does nothing.
        """
        if self._closed or self._calls.is_forked:
            return
        self._closed = True
        self._stream.close_soon()
        try:
            self._finish_writes()
        finally:
            self._close_all()

    def _close_all(self) -> None:
        for watch in self._job_reporters:
            watch.done()
        for steps in list(self._job_steps):
            steps.leave()
        if self._graph is not None:
            self._graph.close()
        try:
            self._calls.close()
        except BaseException:  # Ctrl-C while background calls wait for a shard
            self.cancel_waits()
            raise
        finally:
            self._stream.close()
            self._events.close()
            self._scheduler.carrier.close()
            self._close()

    @property
    def waits_for_shard(self) -> bool:
        """Whether a call waits for a shard that does not answer. Does not block."""
        return bool(self._calls.silence.named)

    def cancel_waits(self) -> None:
        """Abort every wait for a shard: calls in progress, also in the background, soon fail with Unavailable, and
        later ones at once. From any thread.
        """
        self._calls.cancel_waits()
        self._stream.close()
        self._close()  # embedded shards send an error to calls that wait for the other ranks of a step
