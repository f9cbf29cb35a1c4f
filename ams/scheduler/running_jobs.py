"""Running jobs and their progress, from their reports (each second, or with many jobs up to half a minute apart) and
from events.

A shard that is shutting down waits until they have taken a snapshot. Counts of a job (snapshots, recoveries) come from
events, those of an earlier scheduler included. Memory: some kilobytes a job, for 1,000 jobs at most.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from geartrain.ams.observe.event_log import MAX_KEPT, EventLog
from geartrain.ams.scheduler.pauses import PauseDetector
from geartrain.ams.values.scheduler_messages import ClusterEvent, JobCondition, JobEntry, JobReport, SavingJobs
from geartrain.ams.values.text import counted

_WORDS_PER_SECOND, _PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 33, 1.0, 30.0
"""Reports per second of all jobs together (each costs the scheduler half a millisecond of a core, mostly gRPC's); the
shortest and the longest pause of a job between reports."""
_SILENT_SECONDS = 5.0
"""Seconds after a due report from which a job is not waited for."""
_RECOVERING_SECONDS = 120.0
"""Time for which a job that returns to its snapshot is not called silent: it reports nothing meanwhile."""
_LATE_SECONDS = 2.0
"""Seconds after all due reports by which a restarted scheduler has heard from every job."""
_MAX_JOBS = 1_000
_MAX_REASONS = 20
"""Most reasons of failed snapshots: clients choose them, and each is a Prometheus series."""
_KEPT_SECONDS: dict[JobCondition, float] = {"ended": 3.6e3, "stopped": 3.6e3, "failed": 86.4e3, "silent": 86.4e3}
UNDER_WAY = frozenset[JobCondition]({"training", "saving", "recovering", "waiting"})
_KINDS: dict[str, JobCondition] = {
    **dict.fromkeys(("job_began", "job_back", "recovery"), "training"),
    "job_ended": "ended",
    "job_stopped": "stopped",
    "job_failed": "failed",
    "job_silent": "silent",
}
"""State of a job after an event."""


@dataclass
class _Job:
    incarnation: int
    heard: float
    pause: float
    """Pause until its next report."""
    began: float = field(default_factory=time.time)
    """Start of its process, Unix time."""
    report: JobReport = field(default_factory=JobReport)
    stepped: float = -math.inf
    """Time at which its step last rose."""
    trains: bool = False
    """Whether it reported that it trains, and not that it is done."""
    saved: float = -math.inf
    """Time at which it reported that it needs its rows no more."""
    snapshot_step: int | None = None
    snapshot_at: float = 0.0
    """Unix time of its last snapshot."""
    snapshot_failures: Counter[str] = field(default_factory=Counter)
    snapshot_failed_at: dict[str, float] = field(default_factory=dict)
    """Unix time of the last failed snapshot, by the same reasons."""
    failed_at: float = 0.0
    """Unix time of its failure, if it did not start again."""
    recoveries: int = 0
    steps_lost: int = 0

    @property
    def due(self) -> float:
        """Time by which it must report again."""
        return self.heard + self.pause + _SILENT_SECONDS


class RunningJobs:
    """Running jobs, until they have saved their rows, and the outcome of others. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, events: EventLog | None = None) -> None:
        self._events = EventLog() if events is None else events
        self._clock = clock
        self._began = clock()
        self._stops = PauseDetector(_SILENT_SECONDS / 2, clock, self._extend_all)
        self._lock = threading.Lock()
        self._jobs: dict[str, _Job] = {}
        for event in self._events.since(0, MAX_KEPT).events:
            self._apply_event(event)
        self._first_pause = self._pause(sum(job.report.state in UNDER_WAY for job in self._jobs.values()))
        """Pause that an earlier scheduler may have given them."""
        for job in self._jobs.values():
            job.pause = self._first_pause
        self._extend_all()  # they may live: no report could arrive without a scheduler

    def pulse(self) -> None:
        """Record that the scheduler runs, and which jobs are silent. To be called several times in 6 s, or never."""
        with self._lock:
            self._stops.pulse()
            now = self._clock()
            for name, job in list(self._jobs.items()):
                state, silent = job.report.state, now - job.heard
                if silent > _KEPT_SECONDS.get(state, math.inf):
                    del self._jobs[name]
                elif state in UNDER_WAY and now > (job.due if job.trains else job.heard + _RECOVERING_SECONDS):
                    said = (
                        f"nothing was heard of the job for {silent:.0f} s; it was {state} at step {job.report.step:,}"
                    )
                    self._record("job_silent", name, job, said, step=job.report.step)

    def report(
        self, job: str, incarnation: int, *, done: bool, report: JobReport | None = None, is_urgent: bool = False
    ) -> float:
        """Record that a job trains, or that it is ``done``: it has ended, or saved and waits. Ignores past
        incarnations.

        Returns the pause until its next report; ``is_urgent``: the shortest.
        """
        report = report or JobReport(state="ended" if done else "training")
        with self._lock:
            now = self._clock()
            known = self._jobs.get(job)
            if known is not None and known.incarnation > incarnation:
                return _LONGEST_PAUSE_SECONDS
            if known is None or known.incarnation < incarnation:
                known = self._begins(job, incarnation, report, known, now)
            elif known.report.state == "silent":
                said = f"the job is heard again: it is at step {report.step:,}"
                self._record("job_back", job, known, said, step=report.step)
            if report.step > known.report.step:
                known.stepped = now
            known.heard, before, known.report = now, known.report.state, report
            if done and known.trains:
                known.saved = now
            known.trains = not done
            known.pause = self._pause(1 if is_urgent else sum(other.trains for other in self._jobs.values()))
            if report.state != before and report.state in ("ended", "stopped", "failed"):
                said = f"the job {report.state} at step {report.step:,}"
                self._record(f"job_{report.state}", job, known, said, step=report.step)
            return known.pause

    @staticmethod
    def _pause(num_jobs: int) -> float:
        return min(max(_PAUSE_SECONDS, num_jobs / _WORDS_PER_SECOND), _LONGEST_PAUSE_SECONDS)

    def apply_event(self, event: ClusterEvent) -> None:
        """Record an event of a job."""
        with self._lock:
            self._apply_event(event)

    def to_ask(self, *, was_restarted: bool) -> SavingJobs:
        """Return jobs that train, or trained a moment ago. ``was_restarted``: jobs may live unheard."""
        with self._lock:
            now = self._clock()
            recent = now - _SILENT_SECONDS - _PAUSE_SECONDS
            return SavingJobs(
                is_sure=not was_restarted or now - self._began > _LATE_SECONDS + self._first_pause,
                waiting=tuple(name for name, job in self._jobs.items() if job.trains and job.due > now),
                saved=tuple(name for name, job in self._jobs.items() if not job.trains and job.saved > recent),
            )

    def entries(self) -> tuple[JobEntry, ...]:
        """Return all jobs: those under way first, then by order of arrival."""
        with self._lock:
            now, unix = self._clock(), time.time()
            found = [
                JobEntry(
                    job=name,
                    report=job.report,
                    heard_seconds_ago=max(0.0, now - job.heard),
                    step_seconds_ago=max(0.0, now - max(job.stepped, self._began)),
                    began_seconds_ago=max(0.0, unix - job.began),
                    snapshot_step=job.snapshot_step,
                    snapshot_seconds_ago=None if job.snapshot_step is None else max(0.0, unix - job.snapshot_at),
                    snapshot_failures=dict(job.snapshot_failures),
                    recoveries=job.recoveries,
                    steps_lost=job.steps_lost,
                )
                for name, job in self._jobs.items()
            ]
        return tuple(sorted(found, key=lambda entry: entry.report.state not in UNDER_WAY))

    def failed_at(self) -> tuple[dict[str, float], dict[tuple[str, str], float]]:
        """Return Unix times of failed jobs that did not start again, and of the last failed snapshots by job and
        reason."""
        with self._lock:
            jobs = {name: job.failed_at for name, job in self._jobs.items() if job.report.state == "failed"}
            snapshots = {
                (name, why): at for name, job in self._jobs.items() for why, at in job.snapshot_failed_at.items()
            }
        return jobs, snapshots

    def _begins(self, name: str, incarnation: int, report: JobReport, known: _Job | None, now: float) -> _Job:
        """Record a new process of a job: it starts, resumes, or went back because rows were lost."""
        step = report.step
        job = self._jobs[name] = (
            replace(known, incarnation=incarnation) if known else _Job(incarnation, now, _PAUSE_SECONDS)
        )
        job.stepped = now
        if len(self._jobs) > _MAX_JOBS:
            del self._jobs[min(self._jobs, key=lambda other: (self._jobs[other].trains, self._jobs[other].heard))]
        state = None if known is None else known.report.state
        is_lost = state == "silent" or (state in UNDER_WAY and state != "waiting")
        lost_at = report.lost_at_step if state != "waiting" else None
        if lost_at is None and known is not None and is_lost:
            lost_at = known.report.step
        of = f" of {report.last_step:,}" if report.last_step else ""
        if lost_at is None:
            self._record("job_began", name, job, f"the job trains from step {step:,}{of}", step=step)
        else:
            lost = max(0, lost_at - step)
            said = f"the job went back to step {step:,}{of} when a process was lost: {counted(lost, 'step')} lost"
            self._record("recovery", name, job, said, step=step, steps_lost=lost)
        return job

    def _record(self, kind: str, name: str, job: _Job, text: str, *, step: int, steps_lost: int = 0) -> None:
        event = ClusterEvent(kind=kind, text=text, job=name, incarnation=job.incarnation, step=step)
        self._apply_event(self._events.append(replace(event, steps_lost=steps_lost)) or event)

    def _apply_event(self, event: ClusterEvent) -> None:
        job = self._jobs.get(event.job)
        if job is None:
            if event.kind not in _KINDS or not event.job:
                return
            job = self._jobs[event.job] = _Job(event.incarnation, self._clock(), _PAUSE_SECONDS)
        if event.kind in _KINDS:
            job.incarnation = max(job.incarnation, event.incarnation)
            job.report = replace(job.report, state=_KINDS[event.kind], step=event.step or 0)
        if event.kind in ("job_began", "recovery"):
            job.began = event.unix_seconds
        if event.kind == "recovery":
            job.recoveries += 1
            job.steps_lost += event.steps_lost
        elif event.kind == "snapshot":
            job.snapshot_step, job.snapshot_at = event.step, event.unix_seconds
        elif event.kind == "snapshot_failed":
            is_told = event.reason in job.snapshot_failures or len(job.snapshot_failures) < _MAX_REASONS
            reason = event.reason if is_told else "Other"
            job.snapshot_failures[reason] += 1
            job.snapshot_failed_at[reason] = event.unix_seconds
        elif event.kind == "job_failed":
            job.failed_at = event.unix_seconds

    def _extend_all(self) -> None:
        """Extend all deadlines: no report could arrive meanwhile."""
        for job in self._jobs.values():
            job.heard = max(job.heard, self._clock())
