"""What a job asks of the place where its rows are; the rest of it does not know which one it has."""

from __future__ import annotations

from typing import Protocol

from geartrain.ams.client.leave_watch import LeaveWatch
from geartrain.ams.client.snapshots.snapshot import PendingSnapshot
from geartrain.ams.storage.snapshot.folder import Snapshot
from geartrain.bridge.head.class_head import ClassHead
from geartrain.workers.job.interruption import Awaited
from geartrain.workers.job.row_timing import RowTimes
from geartrain.workers.job.state import JobState
from geartrain.workers.recipes.recipe import Recipe


class JobRows(Protocol):
    """The rows of one job. Who reads or snapshots them: ``head.backend.local`` says whether every rank must
    take part, else the first one does so alone.
    """

    times: RowTimes
    """Time that the training waited for rows."""
    watch: LeaveWatch | None
    """Hears which shards want to leave; None: there are none, or another rank does."""

    @property
    def cluster(self) -> Awaited | None:
        """What may be waited for."""

    def open(self, recipe: Recipe, table: str, num_classes: int, saved: Snapshot | None) -> ClassHead:
        """The head, with new rows, or those of ``saved`` in the place of whatever is there. Every rank calls it."""

    def begin_snapshot(self, root: str, name: str, *, parent: str | None, state: JobState) -> PendingSnapshot:
        """Hold the rows and ``state`` as the snapshot ``root``/``name``; with a ``parent``, the rows written since."""

    def drop(self, table: str) -> None:
        """Leave their memory to others: the job has ended, and a snapshot has them."""
