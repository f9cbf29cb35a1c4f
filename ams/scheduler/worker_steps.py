"""Steps done by each worker of a job, for jobs whose workers may be only a number of steps apart.

The workers apply the rule: they ask, and wait by themselves. The scheduler records the progress of each worker with a
lease. A worker that joins starts at the slowest's step, so that no worker waits for steps that were never its own, and
the slowest's step never falls. Nothing is stored on disk: workers report at each step and at least three times a lease.

A restarted scheduler knows no workers. For one lease it trusts each worker's own count and reports of the slowest only
what is certain: a worker silent for that long would not count either. (Workers that join meanwhile, before any of the
others has reported, do not wait for those.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from geartrain.ams.scheduler.pauses import PauseDetector
from geartrain.ams.values.arguments import checked_name
from geartrain.ams.values.errors import InvalidArgument, StaleClient
from geartrain.ams.values.scheduler_messages import JobWorker, SlowWorker, StepsDone

_MAX_DONE = 2**62
_NAMED = 8


@dataclass
class _Worker:
    incarnation: int
    done: int
    since: float
    """Time at which it had done these steps."""
    deadline: float
    """End of its lease."""
    is_guess: bool
    """Whether it joined while others may not have reported yet."""


@dataclass
class _Job:
    workers: dict[str, _Worker] = field(default_factory=dict)

    @property
    def known_workers(self) -> list[_Worker]:
        """Workers whose steps are certain."""
        return [worker for worker in self.workers.values() if not worker.is_guess]

    @property
    def slowest(self) -> int:
        return min((worker.done for worker in self.known_workers or self.workers.values()), default=0)


class WorkerSteps:
    """Steps of all jobs. Thread-safe. Memory: some 200 bytes a worker."""

    def __init__(self, lease_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._stops = PauseDetector(lease_seconds / 4, clock, self._extend_all)
        self._lock = threading.Lock()
        self._jobs: dict[str, _Job] = {}
        self._all_known_at = clock() + lease_seconds
        """Until then an earlier scheduler may have known workers that have not reported to this one yet."""

    def pulse(self) -> None:
        """Record that the scheduler runs. To be called several times a lease, or never."""
        with self._lock:
            self._stops.pulse()

    def report(self, who: JobWorker, done: int | None) -> StepsDone:
        """Record that a worker has ``done`` so many steps (None: it joins), and renew its lease.

        Raises StaleClient (a higher incarnation of the worker has come), InvalidArgument.
        """
        checked_name("job", who.job)
        checked_name("worker", who.worker)
        if done is not None and not 0 <= done <= _MAX_DONE:
            raise InvalidArgument(f"worker {who.worker!r} has done {done} steps; that must lie in [0, 2^62]")
        with self._lock:
            now = self._clock()
            self._drop_expired(now)
            job = self._jobs.setdefault(who.job, _Job())
            worker = self._worker(job, who, done, now)
            worker.deadline = now + self._lease_seconds
            if done is not None and done > worker.done:
                worker.done, worker.since = done, now
            return self._reply(job, worker, now)

    def apart(self) -> dict[str, int]:
        """Return the lead in steps of each job's fastest worker over its slowest."""
        with self._lock:
            self._drop_expired(self._clock())
            done = {name: [worker.done for worker in job.workers.values()] for name, job in self._jobs.items()}
        return {name: max(steps) - min(steps) for name, steps in done.items()}

    def leave(self, who: JobWorker) -> None:
        """Unregister a worker: others no longer wait for it."""
        with self._lock:
            job = self._jobs.get(who.job)
            known = None if job is None else job.workers.get(who.worker)
            if job is not None and known is not None and known.incarnation <= who.incarnation:
                del job.workers[who.worker]
                if not job.workers:
                    del self._jobs[who.job]

    def _worker(self, job: _Job, who: JobWorker, done: int | None, now: float) -> _Worker:
        """Return the reporting worker; it joins if unknown, or under another incarnation."""
        known = job.workers.get(who.worker)
        if known is not None and known.incarnation > who.incarnation:
            raise StaleClient(
                f"incarnation {who.incarnation} of worker {who.worker!r} of job {who.job!r} was superseded by "
                f"{known.incarnation}: another process does its steps; stop this one"
            )
        if known is not None and known.incarnation == who.incarnation:
            return known
        job.workers.pop(who.worker, None)
        is_early = now < self._all_known_at
        # A worker that had lost its lease was not waited for: the others may be far ahead.
        begins = done if done is not None and is_early else max(done or 0, job.slowest)
        worker = job.workers[who.worker] = _Worker(who.incarnation, begins, now, now, is_early and done is None)
        return worker

    def _reply(self, job: _Job, worker: _Worker, now: float) -> StepsDone:
        slowest = job.slowest
        slow = [
            SlowWorker(name, told.done, now - told.since) for name, told in job.workers.items() if told.done == slowest
        ]
        return StepsDone(
            done=worker.done,
            slowest=slowest if now >= self._all_known_at or not job.known_workers else 0,
            lease_seconds=self._lease_seconds,
            slow=tuple(sorted(slow, key=lambda worker: -worker.seconds)[:_NAMED]),
        )

    def _drop_expired(self, now: float) -> None:
        """Drop workers whose lease has ended. Once all live ones have had time to report, count those that joined
        meanwhile as far as the slowest."""
        self._stops.notice()
        if now >= self._all_known_at:
            for job in self._jobs.values():
                slowest = job.slowest
                for worker in job.workers.values():
                    worker.done, worker.is_guess = max(worker.done, slowest), False
        for name, job in list(self._jobs.items()):
            job.workers = {worker: state for worker, state in job.workers.items() if state.deadline >= now}
            if not job.workers:
                del self._jobs[name]

    def _extend_all(self) -> None:
        """Extend all leases: no report could arrive meanwhile."""
        deadline = self._clock() + self._lease_seconds
        for job in self._jobs.values():
            for worker in job.workers.values():
                worker.deadline = deadline
