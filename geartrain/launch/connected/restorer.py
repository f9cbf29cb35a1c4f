"""Snapshots and restores that the scheduler does for jobs: it restores the newest one when a job has lost rows.

:class:`~geartrain.ams.scheduler.data_streams.StreamLeases` stores what is due before any action starts. After a crash,
of the scheduler too, it is still due and is repeated in full: a restore replaces one that was cut off, and workers get
no lease before it has finished.
"""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType
from typing import Any, Self

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect
from geartrain.ams.scheduler.data_streams import RestoredJob, StreamLeases
from geartrain.ams.scheduler.scheduler import Scheduler
from geartrain.ams.storage.snapshot.folder import Snapshot, list_snapshots, prune
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import (
    Fenced,
    GeartrainError,
    ShardRestarted,
    SnapshotDamaged,
    SnapshotNotFound,
    SnapshotSuperseded,
    Unavailable,
)
from geartrain.ams.values.scheduler_messages import Cursor

logger = logging.getLogger(__name__)
_POLL_SECONDS = 0.1
_KEPT = 3
"""Snapshots kept for each job: the older ones are for a damaged file in the newest."""
_SHARD_SECONDS = 10.0
"""Wait for a shard that dies meanwhile, before all jobs are looked at again."""


class JobRestorer:
    """Thread that saves and restores the jobs that ask for it, while the ``with`` block lasts."""

    def __init__(self, scheduler: Scheduler, streams: StreamLeases, address: str) -> None:
        """``address`` is that of the scheduler, of which this is a client."""
        self._scheduler, self._streams, self._address = scheduler, streams, address
        self._config = ClientConfig(recovery_timeout_seconds=_SHARD_SECONDS)
        self._saved_at: dict[str, float] = {}
        """Time of each job's last snapshot on the monotonic clock; after a scheduler restart, its start."""
        self._failed: dict[str, str] = {}
        """Last failure logged for each job."""
        self._cluster: Cluster | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="restorer", daemon=True)

    def __enter__(self) -> Self:
        self._streams.can_restore = True
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        if (cluster := self._cluster) is not None:
            cluster.cancel_waits()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(_POLL_SECONDS):
            for name, job in self._streams.restored_jobs().items():
                try:
                    self._check_job(name, job)
                    self._failed.pop(name, None)
                except Exception as exc:  # other jobs go on, and this one is tried again
                    if self._failed.get(name) != str(exc) and not self._stopping.is_set():
                        self._failed[name] = str(exc)
                        logger.warning("cannot save or restore job %r now; retrying: %s", name, exc)

    def _check_job(self, name: str, job: RestoredJob) -> None:
        view = self._scheduler.describe()
        if not view.ready:
            return  # an absent shard may come back with its rows
        tables = set(job.order.tables)
        if job.due != "restore" and tables.intersection(view.incomplete_tables):
            if not job.due or self._saved(job):  # nothing is due, and the first snapshot exists
                logger.warning("job %r lost rows of a shard; restoring its newest snapshot", name)
                self._streams.set_due(name, "restore")
            else:
                lost = f"table {min(tables.intersection(view.incomplete_tables))!r} has lost rows of a shard"
                why = f"{lost} before job {name!r} had its first snapshot; drop it and create it anew"
                self._streams.stop_restoring(name, ShardRestarted(why))
        elif job.due == "restore":
            self._restore(name, job)
        elif job.due == "snapshot" and not job.is_read:
            self._save(name, job)
        elif not job.due and not tables.intersection(
            (*(spec.name for spec in view.tables), *view.incomplete_tables, *view.restoring_tables)
        ):
            self._streams.stop_restoring(name)  # the tables were dropped: the job has ended
        elif not job.due and job.is_read:
            since = self._saved_at.setdefault(name, time.monotonic())
            if time.monotonic() - since > job.order.every_seconds:
                self._streams.set_due(name, "snapshot")

    def _saved(self, job: RestoredJob) -> list[Snapshot]:
        """Return the snapshots of a job, newest first."""
        found = [listed.snapshot for listed in list_snapshots(job.order.root)]
        return [one for one in found if one is not None and one.manifest.job.get("order") == job.number]

    def _connected(self, name: str) -> Cluster:
        self._cluster = connect(self._address, config=self._config, stream=f"{name}/scheduler")
        return self._cluster

    def _save(self, name: str, job: RestoredJob) -> None:
        """Take a snapshot while no worker reads: every pushed row is then committed, and every committed row pushed.

        A failed one is skipped until the next is due; without the first snapshot the job does not start.
        """
        order, before = job.order, None
        try:
            with self._connected(name) as cluster:
                cluster.require_snapshot_root(order.root)  # before reading the folder
                before = next(iter(self._saved(job)), None)
                cursors = self._streams.cursors(name)
                values = {"order": job.number, "streams": {str(stream): list(at) for stream, at in cursors.items()}}
                step = 0 if before is None else before.manifest.step + 1
                pending = cluster.snapshot(order.root, step=step, values=values, tables=order.tables)
                if before is not None:  # otherwise there is nothing to restore until it is complete
                    self._streams.set_due(name, "")
                pending.result()
            self._streams.record_saved(name, cursors)
            prune(order.root, _KEPT)
        except (Unavailable, Fenced, SnapshotSuperseded):  # the next round handles the lost shard, or saves again
            raise
        except GeartrainError as exc:
            if before is None:
                self._streams.stop_restoring(name, exc)
            raise
        finally:
            self._saved_at[name] = time.monotonic()
            if before is not None:
                self._streams.set_due(name, "")
        self._streams.set_due(name, "")

    def _restore(self, name: str, job: RestoredJob) -> None:
        for snapshot in self._saved(job):
            try:
                with self._connected(name) as cluster:
                    cluster.restore(snapshot.path, tables=job.order.tables, replace=True)
            except SnapshotDamaged as exc:  # found before anything was dropped
                logger.warning("job %r: trying an older snapshot: %s", name, exc)
                continue
            cursors: Any = snapshot.manifest.job["streams"]
            self._streams.restore_cursors(name, {int(stream): Cursor(*at) for stream, at in cursors.items()})
            logger.warning("job %r continues from snapshot %s", name, snapshot.path)
            return
        raise SnapshotNotFound(f"there is no sound snapshot of job {name!r} in {job.order.root}; bring its files back")
