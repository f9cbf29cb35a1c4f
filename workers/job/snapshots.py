"""Snapshots of one job: taken while it trains, when one is due by the clock, and old ones removed.

They are also due every number of steps (``trainer.py``). ``run.py`` resumes a job from one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from geartrain.ams.client.job_reporter import JobReporter
from geartrain.ams.client.snapshots.snapshot import PendingSnapshot, free_name
from geartrain.ams.storage.snapshot.folder import prune
from geartrain.ams.values.errors import (
    GeartrainError,
    SchedulerUnavailable,
    ShardRestarted,
    ShardUnavailable,
    SnapshotDamaged,
    SnapshotError,
    SnapshotNotFound,
    StaleCluster,
    TableNotFound,
    Unavailable,
)
from geartrain.workers.job.state import JobProgress, JobState

_WORTH_SAYING_SECONDS = 2.0
SILENT_SECONDS = 4.0
"""Time after which snapshots no longer ask an unresponsive scheduler."""
_ASKED_AGAIN_SECONDS = 5.0
"""Pause after a failed snapshot that a leaving shard asked for."""
LOST = (ShardRestarted, Unavailable, StaleCluster)
"""Errors that a job gets when a role of its cluster died."""


@dataclass(frozen=True)
class Loss:
    """Time at which a role of the cluster was lost."""

    step: int
    unix_seconds: float


class ResumeFromSnapshot(Exception):
    """A role was lost, and this job has a snapshot of its own to resume from; the cause names the role."""

    def __init__(self, loss: Loss, *, is_planned: bool = False) -> None:
        super().__init__(loss)
        self.loss = loss
        self.is_planned = is_planned
        """Whether a shard is about to end, and the snapshot was taken for that."""


@dataclass(frozen=True)
class SnapshotMoment:
    """Step and time of a snapshot."""

    progress: JobProgress
    seconds: float
    """Time on the clock."""


class SnapshotTaker(Protocol):
    """Object that snapshots the rows of a job: its ``Trainer``."""

    def start_snapshot(self, root: str, name: str, *, parent: str | None, state: JobState) -> PendingSnapshot:
        """Freeze the rows and ``state`` as the snapshot ``root``/``name``; with ``parent``, rows written since."""


class JobSnapshots:
    """Takes snapshots of a job's rows and state. Used from one thread of every rank that takes part.

    One is written at a time, while the training continues. A failed snapshot is reported and skipped: the training
    continues, and the one before stays. But the first and the last of a run are required.
    """

    def __init__(
        self,
        rows: SnapshotTaker,
        root: str,
        *,
        is_first: bool = True,
        keep: int,
        increments: int = 0,
        every_seconds: float | None = None,
        say: Callable[[str], None],
        watch: JobReporter | None = None,
        on_wait: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``keep`` snapshots, that of the best step, and those they build on stay in ``root``, which no other job may
        write to. Of several ranks that take part, the one that ``is_first`` removes the others.

        After a full snapshot, ``increments`` hold only the rows written since the one before. One is due every
        ``every_seconds`` (None: never by the clock), and when ``watch`` reports that a shard wants to leave.
        ``on_wait`` is called each second of a wait.
        """
        self._rows = rows
        self._root = root
        self._is_first = is_first
        self._keep = keep
        self._increments = increments
        self._every_seconds = every_seconds
        self._chain: list[str] = []
        """Names of the newest snapshot and of those it builds on, as far as this object took them; oldest first."""
        self._say = say
        self._watch = watch
        self._on_wait = on_wait
        self._asked = -math.inf
        """Time at which a leaving shard last asked for one."""
        self._clock = clock
        self._pending: tuple[PendingSnapshot, str, SnapshotMoment] | None = None
        self._begun = clock()
        self._failure: GeartrainError | None = None
        self._is_required = False
        self._begins = False
        self.last: SnapshotMoment | None = None
        """Step and time of the newest complete snapshot that this object took."""

    @property
    def is_writing(self) -> bool:
        """Whether one is in progress. From any thread."""
        pending = self._pending
        return self._begins or (pending is not None and not pending[0].done())

    @property
    def saved(self) -> SnapshotMoment | None:
        """Step and time of the newest complete snapshot, waited for or not. From any thread."""
        pending = self._pending
        if pending is not None and pending[0].done():
            with suppress(GeartrainError):
                pending[0].result()
                return pending[2]
        return self.last

    @property
    def is_due(self) -> bool:
        """Whether it is time for another one, or a shard wants to leave."""
        if self._leaving and self._clock() - self._asked >= _ASKED_AGAIN_SECONDS:
            return True
        return self._every_seconds is not None and self._clock() - self._begun >= self._every_seconds

    def start(self, state: JobState, *, is_required: bool = False) -> None:
        """Freeze this moment, and continue while it is written. Waits until the one before is complete. One that
        ``is_required`` is to be confirmed, and not begun where there is one of this moment.

        May raise the errors of a lost shard, which may as well show at the next push, but not those of a disk. Raises
        ResumeFromSnapshot once it is complete if a shard wants to leave: later training would be lost with the shard.
        """
        self.wait()
        self._is_required = is_required
        if is_required and self._holds(state):
            return
        self._begins = True
        try:
            leaving = self._start(state)
        finally:
            self._begins = False
        if leaving:
            moment = self._pending[2] if self._pending is not None else None
            self.wait()
            if moment is not None and self.last is moment:
                self._release_shards(leaving, moment)

    def _start(self, state: JobState) -> tuple[int, ...]:
        """Begin a snapshot; return the shards that want to leave, for which it was begun."""
        leaving = self._leaving
        if leaving:
            self._asked = self._clock()
        moment = SnapshotMoment(state.progress, self._clock())
        self._begun = moment.seconds
        silent = 0.0 if self._watch is None else self._watch.silent_seconds
        if silent > SILENT_SECONDS:  # asking it would stop the training in vain
            self._report(moment, SchedulerUnavailable(f"the scheduler has not answered for {silent:.0f} s"))
            return ()
        try:
            name = free_name(self._root, state.progress.step)  # it is taken if the job went back behind a damaged one
            pending = self._begun_on_parent(name, state)
            if pending is None:
                self._chain = []
                pending = self._rows.start_snapshot(self._root, name, parent=None, state=state)
        except (SnapshotError, TableNotFound, SchedulerUnavailable) as exc:
            # Not found: a shard was restarted since the last push, which the next push reports, and the job goes back;
            # or the scheduler was, and not every shard has reported its tables.
            lost = "a role was restarted, and the scheduler does not know the tables of this job (any more, or yet)"
            self._report(moment, ShardRestarted(lost) if isinstance(exc, TableNotFound) else exc)
            return ()
        self._pending = pending, name, moment
        return leaving

    def _begun_on_parent(self, name: str, state: JobState) -> PendingSnapshot | None:
        """Begin one that builds on the newest; None: there is none, it cannot be built on any more, or has enough."""
        if not 0 < len(self._chain) <= self._increments:
            return None
        try:
            return self._rows.start_snapshot(self._root, name, parent=self._chain[-1], state=state)
        except (SnapshotDamaged, SnapshotNotFound) as exc:
            self._say(f"The snapshot of step {state.progress.step} is a whole one: {exc}")
            return None

    def wait(self) -> None:
        """Wait until the pending snapshot is complete, or has failed."""
        if self._pending is None:
            return
        pending, name, moment = self._pending
        started = self._clock()
        try:
            try:
                while not pending.done():
                    with suppress(TimeoutError):
                        pending.result(1.0)
                    self._on_wait()
                pending.result()
            finally:
                self._pending = None
        except SnapshotError as exc:
            self._chain = []  # the error may concern its parent
            self._report(moment, exc)
        else:
            self.last = moment
            self._chain = [*self._chain, name] if len(self._chain) <= self._increments else [name]
            if self._is_first:
                self._prune(moment.progress.best)
        if (waited := self._clock() - started) > _WORTH_SAYING_SECONDS:
            self._say(f"Waited {waited:.0f} s for the snapshot of step {moment.progress.step}; take them less often")

    @property
    def _leaving(self) -> tuple[int, ...]:
        return () if self._watch is None else self._watch.leaving

    def _release_shards(self, leaving: tuple[int, ...], moment: SnapshotMoment) -> None:
        """Let shards leave, and continue from the snapshot once others have taken their places."""
        assert self._watch is not None
        step, which = moment.progress.step, f"shard {', '.join(map(str, leaving))}"
        self._say(f"Step {step} is saved, since {which} is to end; waiting for what takes its place")
        self._watch.done("waiting")
        raise ResumeFromSnapshot(Loss(step, time.time()), is_planned=True) from ShardUnavailable(
            f"{which} was told to end, and step {step} is saved; start the job again once another has taken its place"
        )

    def _prune(self, best: dict[str, Any] | None) -> None:
        try:
            prune(self._root, self._keep, spare=best["step"] if best is not None else None)
        except SnapshotError as exc:
            self._say(f"Old snapshots stay for now: {exc}")

    def require(self, state: JobState) -> None:
        """Return once there is one of this moment. Raises its error: SnapshotError, or as :meth:`start`."""
        self.start(state, is_required=True)
        self.confirm(state)

    def confirm(self, state: JobState) -> None:
        """Return once the required one of this moment is complete. Raises its error."""
        self.wait()
        if not self._holds(state):
            assert self._failure is not None
            raise self._failure

    def _holds(self, state: JobState) -> bool:
        return self.last is not None and self.last.progress == state.progress

    def _report(self, moment: SnapshotMoment, exc: GeartrainError) -> None:
        self._failure = exc
        if not self._is_required:
            self._say(f"No snapshot of step {moment.progress.step}, training goes on: {exc}")
