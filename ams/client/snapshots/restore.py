"""Restore of a snapshot to a whole cluster: tables are created, filled, and opened once every shard has their rows.

Order: the snapshot is verified, the tables are created (in the place of those to replace), the shards read their rows,
the scheduler publishes all tables at once. Before that no client can open, read or write them. A restore that is cut
off leaves them unpublished, until a restore in their place starts anew or they are dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from geartrain.ams.client.scheduler_calls import SchedulerCalls
from geartrain.ams.client.shard_calls import ShardCalls, all_of
from geartrain.ams.client.snapshots.snapshot import chosen_tables
from geartrain.ams.observe import failpoints
from geartrain.ams.rpc.client.backoff import Backoff
from geartrain.ams.storage.snapshot.chain import layers_of
from geartrain.ams.storage.snapshot.folder import Snapshot, list_snapshots, open_snapshot
from geartrain.ams.storage.snapshot.manifest import GRAPH
from geartrain.ams.storage.snapshot.store import Place, place
from geartrain.ams.values.errors import (
    ClusterNotReady,
    GeartrainError,
    InvalidArgument,
    OutOfMemory,
    SchedulerUnavailable,
    ShardRestarted,
    ShardUnavailable,
    SnapshotDamaged,
    SnapshotError,
    SnapshotNotFound,
    TableExists,
    TableNotFound,
)
from geartrain.ams.values.shard_messages import CallContext, Done, Restore
from geartrain.ams.values.specs import TableSpec

if TYPE_CHECKING:
    from geartrain.ams.graph.client.calls import GraphCalls

logger = logging.getLogger(__name__)


def restore_snapshot(
    calls: ShardCalls,
    path: str | Path,
    scheduler: SchedulerCalls,
    *,
    tables: Sequence[str] | None = None,
    replace: bool = False,
    caller: CallContext | None = None,
    graphs: Callable[[bool], GraphCalls | None] = lambda _: None,
) -> Snapshot:
    """Create the tables of a snapshot, with all their rows, on the present shards, however many wrote it.

    ``path`` must mean the same folder here and on every shard; ``tables`` are those to restore, None: all. No client
    can open them before every shard has its rows. After a failure before that, the tables made so far are dropped. With
    ``replace`` tables of these names are dropped first, once the whole snapshot was verified here, which is one more
    read of all of it, and every shard has found it. ``graphs``, called with whether the snapshot holds graphs of these
    tables, returns their receiver once the tables are open.
    Raises TableExists, TableNotFound, SnapshotNotFound, SnapshotDamaged, ShardUnavailable, SchedulerUnavailable.
    """
    snapshot = _open(place(path))
    if any(part.manifest.is_export for part in snapshot.chain()):
        raise InvalidArgument(
            f"{snapshot.path} is a version of an export: it has rows without their optimizer's state, for followers "
            "(TableFollower); restore a snapshot of the cluster"
        )
    specs = [TableSpec.from_dict(fields) for fields in snapshot.manifest.tables]
    if tables is not None:
        chosen = chosen_tables(tables, [spec.name for spec in specs], "snapshot")
        specs = [spec for spec in specs if spec.name in chosen]
    numbered = [spec.name for spec in specs if spec.num_rows is not None]
    graph_files = [entry for entry in snapshot.manifest.files if entry.kind == GRAPH and entry.table in numbered]
    made: list[TableSpec] = []
    try:
        snapshot.job_files()  # verify all of it before any of it is used
        if replace:
            all_of(snapshot.verify())
            # Every shard finds it too, and the caller is not superseded.
            all_of(calls.on_all_shards(Restore(folder=str(snapshot.path), tables=()), caller=caller))
        for spec in specs:
            made.append(_made(scheduler, spec, replace=replace))
            failpoints.reach("restore.create.after")
        _restore_rows(calls, snapshot, made, caller)
        for entry in graph_files if not replace else ():  # while the tables can still be kept
            snapshot.read(entry)
        failpoints.reach("restore.publish.before")
    except BaseException as exc:
        _drop(scheduler, made)
        if not (replace and made):
            raise
        gone = f"the tables that it was to replace ({', '.join(table.name for table in made)}) are gone"
        if isinstance(exc, OutOfMemory):  # it says of each write that it changed nothing
            raise OutOfMemory(
                f"{snapshot.path} was not restored, and {gone}; make room, and restore it again: {exc}"
            ) from exc
        logger.warning("%s was not restored, and %s; restore it again", snapshot.path, gone)
        raise
    _publish(calls, scheduler, made)
    failpoints.reach("restore.publish.after")
    calls.restored(made)
    if (service := graphs(bool(graph_files))) is not None:
        incarnations = {table.name: table.incarnation for table in made if table.num_rows is not None}
        _restore_graphs(service, snapshot, incarnations, there_are_some=bool(graph_files))
    return snapshot


def _made(scheduler: SchedulerCalls, spec: TableSpec, *, replace: bool) -> TableSpec:
    try:
        return scheduler.create_table(spec, for_restore=True, replace=replace)
    except TableExists as exc:
        raise TableExists(
            f"table {spec.name!r} of the snapshot exists already; drop it, or let replace=True (--replace) do that "
            "once the snapshot is known to be sound"
        ) from exc


def _restore_rows(calls: ShardCalls, snapshot: Snapshot, made: Sequence[TableSpec], caller: CallContext | None) -> None:
    """Make every shard read its rows of the tables."""
    chain = snapshot.chain()
    expected = sum(entry.num_rows for spec in made for layer in layers_of(chain, spec.name) for entry in layer.blocks())
    request = Restore(
        folder=str(snapshot.path),
        tables=tuple(table.name for table in made),
        incarnations=tuple(table.incarnation for table in made),
    )
    replies = all_of(calls.on_all_shards(request, calls.config.snapshot_timeout_seconds, caller=caller))
    found = sum(reply.created for reply in replies if isinstance(reply, Done))
    if found != expected:
        raise SnapshotDamaged(
            f"{snapshot.path} lists {expected} rows, {found} were there to restore; use another snapshot"
        )


def _publish(calls: ShardCalls, scheduler: SchedulerCalls, made: Sequence[TableSpec]) -> None:
    """Open the tables; a scheduler that is away for a moment does not void a long restore.

    If it refuses they are dropped, unless an earlier attempt had no answer: other clients may then have them open.
    """
    backoff = Backoff(calls.config.recovery_timeout_seconds)
    may_be_open = False
    while True:
        try:
            scheduler.publish_tables(made)
            return
        except (SchedulerUnavailable, ClusterNotReady, ShardUnavailable) as exc:
            may_be_open |= isinstance(exc, SchedulerUnavailable)
            if not backoff.pause():
                raise
        except (TableNotFound, ShardRestarted):
            if not may_be_open:
                _drop(scheduler, made)
            raise


def _drop(scheduler: SchedulerCalls, made: Sequence[TableSpec]) -> None:
    for table in made:
        with suppress(GeartrainError):  # the first error is the one to raise
            scheduler.drop_table(table.name, table.incarnation)


def _restore_graphs(graphs: GraphCalls, snapshot: Snapshot, tables: Mapping[str, int], *, there_are_some: bool) -> None:
    try:
        if there_are_some:
            graphs.restore_snapshot(str(snapshot.path), tables)
            return
        for table in tables:  # existing graphs are of other rows; a service that is gone is not waited for
            graphs.forget(table)
    except GeartrainError as exc:  # the tables are open, so the restore is done; a graph can be built again
        logger.warning("the graphs of %s were not restored: %s", snapshot.path, exc)


def _open(folder: Place) -> Snapshot:
    try:
        return open_snapshot(folder)
    except SnapshotError as exc:
        if inside := [listed.name for listed in list_snapshots(folder)]:
            raise SnapshotNotFound(
                f"{folder} is not a snapshot, but a folder of snapshots: {', '.join(inside[:5])}; give one of them"
            ) from exc
        raise
