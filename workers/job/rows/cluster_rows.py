"""Rows in a cluster: of other processes, or one shard in this one."""

from __future__ import annotations

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.leave_watch import LeaveWatch
from geartrain.ams.client.snapshots.snapshot import PendingSnapshot
from geartrain.ams.storage.snapshot.folder import Snapshot
from geartrain.bridge.head.class_head import ClassHead
from geartrain.workers.job.ranks import JobRanks
from geartrain.workers.job.row_timing import TimedCluster
from geartrain.workers.job.state import JobState
from geartrain.workers.recipes.recipe import Recipe, head_of


class JobRowsInCluster:
    """Implements :class:`geartrain.workers.job.rows.job_rows.JobRows`. Snapshots are written while the job goes on."""

    def __init__(self, cluster: Cluster, ranks: JobRanks, watch: LeaveWatch | None = None) -> None:
        self.watch = watch
        self.cluster = cluster
        self._ranks = ranks
        self._timed = TimedCluster(cluster)
        self.times = self._timed.times

    def open(self, recipe: Recipe, table: str, num_classes: int, saved: Snapshot | None) -> ClassHead:
        """See ``JobRows``."""
        if saved is not None and self._ranks.is_first:
            self.cluster.restore(saved.path, replace=True)
        self._ranks.barrier("rows restored")  # no rank may look for the table before it is there
        sync = self._ranks.world_size > 1
        return head_of(recipe, self._timed, table, num_classes, reuse=saved is not None, sync=sync)

    def begin_snapshot(self, root: str, name: str, *, parent: str | None, state: JobState) -> PendingSnapshot:
        """See ``JobRows``."""
        return self.cluster.snapshot(
            root,
            name,
            parent=parent,
            step=state.progress.step,
            values=state.values(),
            files=state.files(),
            tables=[state.progress.table],
            graphs=False,  # the head's own is among the files
        )

    def drop(self, table: str) -> None:
        """See ``JobRows``."""
        self.cluster.drop_table(table)
