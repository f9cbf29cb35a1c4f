"""Rows on the devices of the job's ranks: no cluster."""

from __future__ import annotations

from concurrent.futures import Future

import torch

from geartrain.ams.client.leave_watch import LeaveWatch
from geartrain.ams.client.snapshots.snapshot import PendingSnapshot
from geartrain.ams.storage.snapshot.folder import Snapshot
from geartrain.ams.storage.snapshot.store import Place
from geartrain.ams.values.errors import ConfigError
from geartrain.bridge.head.class_head import ClassHead
from geartrain.workers.job.row_timing import RowTimes
from geartrain.workers.job.state import JobState
from geartrain.workers.recipes.recipe import Recipe, head_of


class JobRowsOnRanks:
    """Implements :class:`geartrain.workers.job.rows.job_rows.JobRows`. All ranks write a snapshot while the training
    waits; ``root`` is the same folder for all of them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._head: ClassHead | None = None
        self.times = RowTimes()
        self.watch: LeaveWatch | None = None
        self.cluster = None

    def open(self, recipe: Recipe, table: str, num_classes: int, saved: Snapshot | None) -> ClassHead:
        """See ``JobRows``."""
        self._head = head = head_of(recipe, None, table, num_classes)
        head.to(self._device)
        if saved is not None:
            head.restore(saved.path)
        return head

    def begin_snapshot(self, root: str, name: str, *, parent: str | None, state: JobState) -> PendingSnapshot:
        """See ``JobRows``: it is whole when this returns. Every rank calls it."""
        if self._head is None or parent is not None:
            raise ConfigError("rows on ranks are snapshotted whole, once there are any")
        path = self._head.snapshot(root, name, step=state.progress.step, values=state.values(), files=state.files())
        written: Future[Place] = Future()
        written.set_result(path)
        return PendingSnapshot(path, written)

    def drop(self, table: str) -> None:
        """They end with the processes."""
