"""Which jobs train now: whoever wants to end a shard waits until they have taken a snapshot."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from geartrain.ams.values.scheduler_messages import JobsToAsk

_SILENT_SECONDS = 6.0
"""A job that says nothing for so long is not waited for."""
_HEARD_FROM_ALL_SECONDS = 3.0
"""After so long a scheduler that was restarted has heard from every job."""


class RunningJobs:
    """The jobs that say so, about once a second, until they have saved what they are asked to. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._lock = threading.Lock()
        self._heard: dict[str, tuple[int, float]] = {}
        """Incarnation of each, and when it was heard last."""
        self._saved: dict[str, float] = {}
        """When jobs said that they need their rows no more."""

    def tell(self, job: str, incarnation: int, *, done: bool) -> None:
        """Note that a job trains, or that it is ``done``: it has ended, or saved and waits. Past ones are ignored."""
        with self._lock:
            now = self._clock()
            if self._heard.get(job, (0, 0.0))[0] > incarnation:
                return
            if done:
                if self._heard.pop(job, None) is not None:
                    self._saved[job] = now
            else:
                if job not in self._heard:
                    self._forget(now)
                self._saved.pop(job, None)
                self._heard[job] = incarnation, now

    def to_ask(self, *, was_restarted: bool) -> JobsToAsk:
        """Those that train, and those that trained a moment ago. ``was_restarted``: jobs may live unheard."""
        with self._lock:
            now = self._clock()
            self._forget(now)
            is_sure = not was_restarted or now - self._began > _HEARD_FROM_ALL_SECONDS
            return JobsToAsk(is_sure=is_sure, waiting=tuple(self._heard), saved=tuple(self._saved))

    def _forget(self, now: float) -> None:
        recent = now - _SILENT_SECONDS
        self._heard = {job: heard for job, heard in self._heard.items() if heard[1] > recent}
        self._saved = {job: at for job, at in self._saved.items() if at > recent}
