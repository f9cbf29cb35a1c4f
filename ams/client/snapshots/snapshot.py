"""Snapshots of a whole cluster: all shards freeze one moment, write it in the background, and one process commits it.

Order: freeze on every shard (short), blocks written and synced by the shards, manifest committed here, freeze ended.
After any failure the snapshot is given up as a whole: it is not listed, and the shards go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geartrain.ams.client.retries import Outcome
from geartrain.ams.client.shard_calls import ShardCalls, all_of
from geartrain.ams.observe import failpoints
from geartrain.ams.storage.snapshot.blocks import write_job_file
from geartrain.ams.storage.snapshot.folder import Snapshot, Staging, new_staging, open_snapshot
from geartrain.ams.storage.snapshot.manifest import FileEntry, Parent, Writer
from geartrain.ams.storage.snapshot.store import Place, is_name, parent_of, place, store_of, within
from geartrain.ams.values.errors import (
    GeartrainError,
    GraphUnavailable,
    InvalidArgument,
    SchedulerUnavailable,
    SnapshotFailed,
    StaleClient,
    StateError,
    TableNotFound,
)
from geartrain.ams.values.interrupts import uninterrupted
from geartrain.ams.values.scheduler_messages import ClusterView
from geartrain.ams.values.shard_messages import FREEZE_LEASE_SECONDS, CallContext, Freeze, Thaw, WriteFrozen, Written
from geartrain.ams.values.specs import TableSpec
from geartrain.ams.values.text import quoted

if TYPE_CHECKING:
    from geartrain.ams.graph.client.calls import GraphCalls

logger = logging.getLogger(__name__)

_RENEW_SECONDS = FREEZE_LEASE_SECONDS / 4
_REPORT_SECONDS = 2.0
"""Delay of a snapshot's end by a shard that does not answer and is no longer needed, at most."""


@dataclass(frozen=True, kw_only=True)
class JobContents:
    """Contents of a snapshot beside the rows."""

    step: int = 0
    """Step at whose boundary it is taken."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """JSON values: cursors, settings."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Opaque bytes by name, such as a backbone's safetensors."""

    def __post_init__(self) -> None:
        for label, value in (("values", self.values), ("files", self.files)):
            if not isinstance(value, Mapping):
                raise InvalidArgument(f"{label} is {quoted(value)}; it must be a dict, or None")
        for name, data in self.files.items():
            if not isinstance(name, str):
                raise InvalidArgument(f"a file is called {quoted(name)}; its name must be a string")
            if not isinstance(data, bytes | bytearray | memoryview):
                raise InvalidArgument(f"file {name!r} is {type(data).__name__}; it must be bytes")


class PendingSnapshot:
    """A snapshot whose moment is frozen and whose files are being written."""

    def __init__(self, path: Place, work: Future[Place]) -> None:
        self.path = path
        """Folder of the snapshot: an absolute Path, or a URL."""
        self._work = work

    def done(self) -> bool:
        """Return whether :meth:`result` returns at once."""
        return self._work.done()

    def result(self, timeout_seconds: float | None = None) -> Place:
        """Wait until the snapshot is complete and on disk; return its folder.

        Raises SnapshotFailed, or another GeartrainError if a shard was lost; TimeoutError if it is not done in time.
        """
        return self._work.result(timeout_seconds)

    def when_done(self, then: Callable[[BaseException | None], None]) -> None:
        """Call ``then`` with None once it is complete, or with the error once it has failed."""

        def finish(work: Future[Place]) -> None:
            if not work.cancelled():
                then(work.exception())

        self._work.add_done_callback(finish)


@dataclass
class _Hold:
    """Renews the leases of a freeze until the snapshot is done or this process dies."""

    calls: ShardCalls
    freeze: Freeze
    caller: CallContext | None
    check_caller: Callable[[], None]
    graphs: GraphCalls | None
    _ended: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Start to renew."""
        self.calls.held_snapshots.add(self.freeze.snapshot_id)
        renewing = threading.Thread(target=self._renew, name="geartrain-freeze", daemon=True)
        uninterrupted(renewing.start)

    def stop(self) -> None:
        """Stop. Idempotent."""
        self._ended.set()
        self.calls.held_snapshots.discard(self.freeze.snapshot_id)

    def require_current(self) -> None:
        """Raise StaleClient if a shard or the scheduler knows that this process was superseded. Skips those that do not
        answer."""
        for outcome in self._renewed():
            if isinstance(outcome, StaleClient):
                raise outcome
        with suppress(SchedulerUnavailable):  # the shards know as well
            self.check_caller()

    def _renewed(self) -> list[Outcome]:
        return self.calls.on_all_shards(self.freeze, _REPORT_SECONDS, recovery_seconds=0, caller=self.caller)

    def _renew(self) -> None:
        while not self._ended.wait(_RENEW_SECONDS):
            with suppress(GeartrainError):  # the write or the commit meets the shard's error
                self._renewed()
            if self.calls.has_given_up:
                return


def free_name(root: str | Path, step: int) -> str:
    """Return ``step-000000042``, or ``step-000000042-2`` and so on if that exists, for example from an earlier run of
    the same script.
    """
    folder, name = place(root), f"step-{step:09}"
    store = store_of(folder)
    names = chain([name], (f"{name}-{again}" for again in count(2)))
    try:
        return next(free for free in names if not store.exists(within(folder, free)))
    except OSError:
        return name  # writing there reports what is wrong with the folder


def start_snapshot(
    calls: ShardCalls,
    view: Callable[[], ClusterView],
    root: str | Path,
    name: str,
    job: JobContents,
    *,
    tables: Sequence[str] | None = None,
    parent: str | Path | None = None,
    caller: CallContext | None = None,
    check_caller: Callable[[], None] = lambda: None,
    when_frozen: Callable[[], None] = lambda: None,
    graphs: GraphCalls | None = None,
    rows_alone: bool = False,
) -> PendingSnapshot:
    """Freeze the present moment on every shard and begin to write it; returns once it is frozen.

    ``root`` must mean the same folder here and on every shard. ``view`` returns the existing tables; ``tables`` are
    those to write, None: all but those being restored. A shard that does not know the writes since ``parent``, a
    snapshot of the same root, writes all of its rows. ``check_caller`` raises StaleClient if the scheduler knows that
    ``caller`` was superseded. ``when_frozen`` is called once all shards have frozen: if it raises, there is no
    snapshot. ``rows_alone``: a version of an export, without the optimizer's state; it raises Busy rather than end
    another snapshot of the same tables. Raises InvalidArgument, TableNotFound, SnapshotNotFound,
    SnapshotDamaged (of the parent), SnapshotFailed, ShardUnavailable, and StaleClient if ``caller`` was superseded.
    """
    root = place(root)
    older = None if parent is None else _parent(root, parent)
    now = view()
    if not now.tables and not job.values and not job.files:
        raise SnapshotFailed(
            "this cluster has no table, or none that is whole ('geartrain table list'): a snapshot would hold nothing, "
            "yet count as the newest. Create or restore tables first; a job without tables gives values= or files="
        )
    chosen = _whole_tables(now) if tables is None else chosen_tables(tables, _names(now.tables), "cluster")
    staging = new_staging(root, name)
    parent_id = "" if older is None else older.manifest.moment_id
    freeze = Freeze(
        snapshot_id=staging.id, tables=chosen, parent_id=parent_id, export_root=str(root) if rows_alone else ""
    )
    hold = _Hold(calls, freeze, caller, check_caller, graphs)
    try:
        hold.start()
        # If one shard waited for another snapshot to end, the moments would be far apart.
        all_of(calls.on_all_shards(freeze, recovery_seconds=0 if rows_alone else None, caller=caller))
        specs = [spec for spec in view().tables if spec.name in chosen]
        there = {(spec.name, spec.incarnation) for spec in specs}
        before = {(spec.name, spec.incarnation) for spec in now.tables if spec.name in chosen}
        changed = {name for name, _ in before - there}
        if changed:
            raise SnapshotFailed(f"tables {sorted(changed)} were dropped or recreated meanwhile; take it again")
        when_frozen()
        write = WriteFrozen(snapshot_id=staging.id, folder=staging.path, rows_alone=rows_alone)
        work = calls.background(_finish, hold, staging, specs, job, older, write)
    except BaseException:  # also Ctrl-C
        hold.stop()
        _discard(calls, staging)
        raise
    return PendingSnapshot(within(staging.root, name), work)


def _finish(
    hold: _Hold, staging: Staging, specs: list[TableSpec], job: JobContents, older: Snapshot | None, write: WriteFrozen
) -> Place:
    calls, caller = hold.calls, hold.caller
    try:
        if older is not None:
            _require_parent(older)  # the parent must be restorable
        outcomes = all_of(calls.on_all_shards(write, calls.config.snapshot_timeout_seconds, caller=caller))
        replies = [reply for reply in outcomes if isinstance(reply, Written)]
        files = [FileEntry.model_validate_json(text) for reply in replies for text in reply.files]
        specs = [_frozen_spec(spec, replies) for spec in specs]
        deltas: dict[str, list[int]] = {}
        for shard, reply in enumerate(replies):
            for table in reply.deltas:
                deltas.setdefault(table, []).append(shard)
        unknown = {entry.table for entry in files if entry.table is not None}.union(deltas) - {
            spec.name for spec in specs
        }
        if unknown:
            raise SnapshotFailed(f"tables {sorted(unknown)} were created or dropped meanwhile; take it again")
        if older is not None:
            _require_parent(older)  # nor may it have been pruned meanwhile
        files += [
            write_job_file(staging.path, snapshot_id=staging.id, name=name, data=data)
            for name, data in job.files.items()
        ]
        files += _graph_files(hold.graphs, staging, specs, files)
        if caller is not None:  # it may have been paused for long, and its job have gone on without it
            hold.require_current()
        path = staging.commit(
            step=job.step,
            created=time.time(),
            num_shards=calls.view.num_shards,
            bucket_shards=calls.view.bucket_shards,
            tables=[spec.to_dict() for spec in specs],
            files=sorted(files, key=lambda entry: entry.path),
            job=job.values,
            parent=None if older is None else Parent(name=older.name, id=older.manifest.id),
            deltas=deltas,
            writer=None if caller is None else Writer(stream=caller.stream, incarnation=caller.incarnation),
        )
    except BaseException:
        hold.stop()
        _discard(calls, staging)
        raise
    failpoints.reach("snapshot.commit.after")
    hold.stop()
    _thaw(calls, Thaw(snapshot_id=staging.id, kept=True))
    return path


def _frozen_spec(spec: TableSpec, replies: Sequence[Written]) -> TableSpec:
    """Return a table as the shards froze it. Raises SnapshotFailed if they kept different state beside its rows."""
    frozen = [table for reply in replies for table in reply.tables if table.name == spec.name]
    latest = max(frozen, key=lambda table: table.altered)
    if not all(table.keeps_same(latest) for table in frozen):
        raise SnapshotFailed(
            f"table {spec.name!r} was altered on some shards alone when they froze it; take the snapshot again, and if "
            "that fails, too, repeat the alteration (cluster.alter_table), which has not reached all shards"
        )
    return latest


def _names(specs: Sequence[TableSpec]) -> tuple[str, ...]:
    return tuple(spec.name for spec in specs)


def _whole_tables(view: ClusterView) -> tuple[str, ...]:
    """Return names of all tables but those being restored. Raises SnapshotFailed if a table has lost rows, or may
    have."""
    lost = sorted(set(view.incomplete_tables).difference(view.restoring_tables))
    if lost or any(entry.state == "missing" for entry in view.shards):
        raise SnapshotFailed(
            f"tables {lost} are incomplete since a shard was restarted, or shards have not registered since the "
            "scheduler began ('geartrain table list' and 'geartrain status' say which): take it again, or drop those "
            "tables first"
        )
    return _names(view.tables)


def _graph_files(
    graphs: GraphCalls | None, staging: Staging, specs: Sequence[TableSpec], others: Sequence[FileEntry]
) -> list[FileEntry]:
    """Return the blocks of the graphs; none if the service is gone or cannot read them: a graph can be built again."""
    sizes = {spec.name: spec.num_rows for spec in specs if spec.num_rows is not None}
    if graphs is None or not sizes:
        return []
    try:
        return graphs.write_snapshot(staging.path, staging.id, sizes)
    except (GraphUnavailable, StateError) as exc:
        logger.warning("snapshot %r holds no graph: %s", staging.name, exc)
        staging.remove_all_but(others)  # the service may have written some of its blocks
        return []


def _discard(calls: ShardCalls, staging: Staging) -> None:
    try:
        _thaw(calls, Thaw(snapshot_id=staging.id, kept=False))
    finally:
        staging.abandon()


def _parent(root: Place, parent: str | Path) -> Snapshot:
    """Return the snapshot to build on, if its manifest is sound; its own parents are checked in the background."""
    folder = within(root, parent) if isinstance(parent, str) and is_name(parent) else place(parent)
    if parent_of(folder) != root:
        raise InvalidArgument(f"parent is {str(parent)!r}; it must be a snapshot in {root}")
    return open_snapshot(folder)


def _require_parent(older: Snapshot) -> None:
    """Raise SnapshotError unless the parent snapshot, and all that it builds on, still exist."""
    now = open_snapshot(older.path)
    if now.manifest.id != older.manifest.id:
        raise SnapshotFailed(f"{older.path}, to be added to, was replaced by another snapshot meanwhile; take it anew")
    now.chain()


def _thaw(calls: ShardCalls, thaw: Thaw) -> None:
    """Send a thaw, best effort: an unreachable shard releases the freeze when its lease ends."""
    calls.on_all_shards(thaw, min(_REPORT_SECONDS, calls.config.attempt_timeout_seconds), recovery_seconds=0)


def chosen_tables(names: Sequence[str], existing: Sequence[str], where: str) -> tuple[str, ...]:
    """Return the names, each once. Raises TableNotFound for an unknown one, InvalidArgument if there are none."""
    if isinstance(names, str) or not isinstance(names, Collection) or len(names) == 0:
        raise InvalidArgument(f"tables is {names!r}; it must be a list of names, or None for all tables")
    unknown = [name for name in names if name not in existing]
    if unknown:
        known = ", ".join(map(repr, existing)) or "none"
        raise TableNotFound(f"there is no table {unknown[0]!r}; tables of this {where}: {known}")
    return tuple(dict.fromkeys(names))
