"""Step counter of a worker in a job whose workers may be only a number of steps apart, and the wait for others.

Cost: one RPC of some 100 bytes each way to the scheduler for each step, and three a lease between them; during a wait
one each time it has lasted an eighth longer.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress

from geartrain.ams.observe.metrics import Metric, register_source
from geartrain.ams.rpc.carrier import AttemptFailed, SchedulerCarrier
from geartrain.ams.rpc.client.backoff import Backoff
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import GeartrainError, SchedulerUnavailable, StaleClient, WorkerStalled
from geartrain.ams.values.scheduler_messages import JobWorker, LeaveSteps, ReportSteps, StepsDone
from geartrain.ams.values.text import counted

logger = logging.getLogger(__name__)

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.25
_WARN_SECONDS = 10.0
_LEAVE_SECONDS = 2.0
_numbers: defaultdict[tuple[str, str], Iterator[int]] = defaultdict(lambda: itertools.count(2))
_names: set[tuple[str, str]] = set()


def worker_name(job: str, stream: str | None) -> str:
    """Return a name for another worker of a job in this process: that of its ``stream``, or of host and process."""
    name = f"{socket.gethostname()}:{os.getpid()}" if stream is None else stream
    if (job, name) in _names:
        return f"{name}/{next(_numbers[job, name])}"
    _names.add((job, name))
    return name


class JobSteps:
    """Step counter of one worker of a job. Used by one thread; a background thread renews the lease from :meth:`join`
    to :meth:`leave`.

    After a pause longer than the lease it resumes at the slowest worker's step, as a worker that joins.
    """

    def __init__(self, scheduler: SchedulerCarrier, who: JobWorker, config: ClientConfig) -> None:
        self._scheduler, self._who, self._config = scheduler, who, config
        self._known = StepsDone(done=0, slowest=0, lease_seconds=0.0)
        self._renewal: _Renewal | None = None
        self._waited_seconds = 0.0
        register_source(self)

    def metrics(self) -> Iterator[Metric]:
        """Yield its lead over the slowest worker, and the time it waited for slower ones."""
        names, who = ("job", "worker"), (self._who.job, self._who.worker)
        ahead, waited = "Steps ahead of the slowest worker.", "Time that the worker waited for slower ones."
        yield Metric("worker_steps_ahead", "gauge", ahead, names, [(who, self.ahead)])
        yield Metric("worker_wait_seconds_total", "counter", waited, names, [(who, self._waited_seconds)])

    @property
    def done(self) -> int:
        """Steps counted for this worker: those of the slowest when it joined, and its own since."""
        return self._known.done

    @property
    def ahead(self) -> int:
        """Upper bound of its lead over the slowest, in steps, as of the last reply."""
        return self._known.done - self._known.slowest

    def join(self) -> None:
        """Register: others wait for this worker from now on. Idempotent. Raises SchedulerUnavailable, StaleClient."""
        if self._renewal is None:
            self._record(self._asked(None))
            self._renewal = renewal = _Renewal(self._scheduler, self._who, self._known)
            weakref.finalize(self, renewal.stop)

    def step_done(self) -> None:
        """Report one more step. If the scheduler does not answer, others hear of it later."""
        self.join()
        self._record(StepsDone(done=self.done + 1, slowest=self._known.slowest, lease_seconds=0.0))
        with suppress(SchedulerUnavailable):
            self._report(once=True)

    def wait(self, max_ahead: int, seconds: float) -> None:
        """Wait until it is at most ``max_ahead`` steps ahead of the slowest.

        Raises WorkerStalled after ``seconds``, SchedulerUnavailable, StaleClient.
        """
        start, warned, pause = time.monotonic(), _WARN_SECONDS, 0.0
        while self.ahead > max_ahead:
            waited = time.monotonic() - start
            if waited >= seconds:
                raise WorkerStalled(
                    f"{self._waits(max_ahead)}. That took {waited:.0f} s. If one is stuck, end it: its lease ends "
                    f"{self._known.lease_seconds:g} s later. Or call step() again, which continues to wait"
                )
            if waited >= warned:
                logger.warning("%s", self._waits(max_ahead))
                warned *= 2
            began = time.monotonic()
            time.sleep(max(0.0, min(pause, seconds - waited)))
            pause = min(max(waited / 8, _SHORTEST_PAUSE), _LONGEST_PAUSE)
            self._report()
            self._waited_seconds += time.monotonic() - began

    def leave(self) -> None:
        """Unregister: no worker waits for this one any more. Idempotent; :meth:`join` registers it again."""
        renewal, self._renewal = self._renewal, None
        if renewal is not None:
            renewal.stop()

    def _waits(self, max_ahead: int) -> str:
        slow = [f"{them.worker!r} ({them.done} done, since {them.seconds:.0f} s)" for them in self._known.slow]
        return (
            f"worker {self._who.worker!r} of job {self._who.job!r} has done {counted(self.done, 'step')} and may be "
            f"{max_ahead} ahead of the slowest: it waits for {', '.join(slow) or 'those whom the scheduler must hear'}"
        )

    def _report(self, *, once: bool = False) -> None:
        self._record(self._asked(self.done, once=once))

    def _record(self, said: StepsDone) -> None:
        """Record a reply. The slowest's step never falls, whatever a restarted scheduler knows."""
        known = self._known
        slowest = min(max(said.slowest, known.slowest), said.done)
        lease_seconds = said.lease_seconds or known.lease_seconds
        self._known = StepsDone(done=said.done, slowest=slowest, lease_seconds=lease_seconds, slow=said.slow)
        if self._renewal is not None:
            self._renewal.done = said.done

    def _asked(self, done: int | None, *, once: bool = False) -> StepsDone:
        """Return the scheduler's answer; retries for ``recovery_timeout_seconds``, unless ``once``."""
        backoff = Backoff(self._config.recovery_timeout_seconds, longest_pause_seconds=_LONGEST_PAUSE)
        backoff.count_from(time.monotonic())
        while True:
            try:
                return self._scheduler.call(ReportSteps(who=self._who, done=done), self._config.attempt_timeout_seconds)
            except AttemptFailed as exc:
                if once or not backoff.pause():
                    raise SchedulerUnavailable(
                        f"{exc}; it knows how far the workers of job {self._who.job!r} are (for {backoff.seconds:g} s)"
                    ) from None


class _Renewal:
    """Thread that renews a lease, and unregisters the worker at its stop. Holds no reference to its owner."""

    def __init__(self, scheduler: SchedulerCarrier, who: JobWorker, known: StepsDone) -> None:
        self.done = known.done
        self._scheduler, self._who = scheduler, who
        self._pause_seconds = known.lease_seconds / 3
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="geartrain-steps", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread is not threading.current_thread():
            self._thread.join(_LEAVE_SECONDS)

    def _run(self) -> None:
        while not self._ended.wait(self._pause_seconds):
            try:
                self._scheduler.call(ReportSteps(who=self._who, done=self.done), self._pause_seconds)
            except StaleClient:
                return
            except (AttemptFailed, GeartrainError) as exc:
                logger.debug("the lease of worker %r was not renewed: %s", self._who.worker, exc)
        with suppress(AttemptFailed, GeartrainError):
            self._scheduler.call(LeaveSteps(who=self._who), _LEAVE_SECONDS)
