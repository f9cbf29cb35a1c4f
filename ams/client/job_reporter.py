"""Reports a job's progress to the scheduler, and learns which shards are leaving so that the job takes a snapshot
first.

Cost: one RPC of some 100 bytes each way to the scheduler a second, or less often where it says so, on a thread of its
own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from geartrain.ams.rpc.carrier import AttemptFailed, SchedulerCarrier
from geartrain.ams.values.errors import GeartrainError
from geartrain.ams.values.scheduler_messages import JobCondition, JobReport, ReportJob

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 1.0
_ANSWER_SECONDS = 2.0


class JobReporter:
    """Registers a job as training until it is :meth:`done`. Thread-safe."""

    def __init__(
        self, scheduler: SchedulerCarrier, job: str, incarnation: int, report: Callable[[], JobReport] = JobReport
    ) -> None:
        """``report`` returns the job's progress; it is called on another thread."""
        self._scheduler, self._job, self._incarnation, self._report = scheduler, job, incarnation, report
        self._ended = threading.Event()
        self._silent_since: float | None = None
        self._is_dumb = False
        self._pause_seconds = _REPORT_SECONDS
        self.leaving: tuple[int, ...] = ()
        """Shards that want to leave, as of the last reply."""
        self._report_once()  # before training starts: a shard that shuts down next then knows the job
        self._thread = threading.Thread(target=self._report_loop, name="geartrain-leave-watch", daemon=True)
        self._thread.start()

    @property
    def silent_seconds(self) -> float:
        """Seconds since the scheduler last answered; 0 if it answered the last report."""
        since = self._silent_since
        return 0.0 if since is None else time.monotonic() - since

    def done(self, state: JobCondition | None = None) -> None:
        """Report that the job needs its rows no more: it has ended, or a snapshot has them. Idempotent.

        ``state`` is its present state; None: as it reports; "ended" if it reports that it trains.
        """
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join()  # first: a report in flight would register the job as training again
        with suppress(AttemptFailed, GeartrainError):  # the scheduler drops the job soon
            report = self._said() or JobReport()
            said = "ended" if report.state in ("training", "saving") else report.state
            report = replace(report, state=state or said)
            self._scheduler.call(
                ReportJob(job=self._job, incarnation=self._incarnation, done=True, report=report), _ANSWER_SECONDS
            )

    def _report_loop(self) -> None:
        while not self._ended.wait(self._pause_seconds) and self._report_once():
            pass

    def _report_once(self) -> bool:
        """Report once; return whether to continue."""
        began = time.monotonic()
        try:
            tell = ReportJob(job=self._job, incarnation=self._incarnation, report=self._said())
            heard = self._scheduler.call(tell, _ANSWER_SECONDS)
            self.leaving, self._silent_since = heard.leaving, None
            self._pause_seconds = max(heard.pause_seconds, _REPORT_SECONDS)
        except AttemptFailed:
            self._silent_since, self._pause_seconds = self._silent_since or began, _REPORT_SECONDS
        except GeartrainError as exc:
            logger.warning("job %r cannot ask the scheduler which shards leave: %s", self._job, exc)
            return False
        return True

    def _said(self) -> JobReport | None:
        """Return the job's report; None if its function fails: it still trains, and shards must wait for it."""
        try:
            return self._report()
        except Exception as exc:
            if not self._is_dumb:
                logger.warning("job %r cannot report its progress: %r", self._job, exc)
            self._is_dumb = True
            return None
