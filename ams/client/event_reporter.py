"""Background sender of a client's events to the scheduler."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque

from geartrain.ams.rpc.carrier import AttemptFailed, SchedulerCarrier
from geartrain.ams.values.errors import GeartrainError
from geartrain.ams.values.scheduler_messages import ClusterEvent, ReportEvent

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 2.0
_PAUSE_SECONDS = 0.5
_TOLD_FOR_SECONDS = 60.0
"""Age at which an unsent event is dropped."""
_LAST_SECONDS = 1.0
"""Time for unsent events when the client closes."""
_MAX_WAITING = 100


class EventReporter:
    """Sends events, each until it arrived once. Never blocks or raises. Thread-safe.

    Cost: one RPC an event, on a thread that starts with the first event and ends with the last.
    """

    def __init__(self, scheduler: SchedulerCarrier) -> None:
        self._scheduler = scheduler
        self._lock = threading.Lock()
        self._waiting: deque[tuple[ReportEvent, float]] = deque(maxlen=_MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    def report(self, event: ClusterEvent) -> None:
        """Send an event soon, in the background."""
        if self._ended.is_set():
            return
        with self._lock:
            self._waiting.append((ReportEvent(event=event, key=secrets.randbits(63)), time.monotonic()))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="geartrain-events", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Wait briefly for unsent events, then accept no more. Idempotent."""
        thread = self._thread
        if thread is not None:
            thread.join(_LAST_SECONDS)
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                tell, since = self._waiting.popleft()
            while not self._deliver(tell) and time.monotonic() - since < _TOLD_FOR_SECONDS:
                if self._ended.wait(_PAUSE_SECONDS):
                    return

    def _deliver(self, tell: ReportEvent) -> bool:
        """Send an event; return whether a retry is pointless."""
        try:
            self._scheduler.call(tell, _ANSWER_SECONDS)
        except AttemptFailed:
            return False
        except GeartrainError as exc:  # a scheduler of an earlier version, or a token without the right
            logger.debug("%r was not noted by the scheduler: %s", tell.event.text, exc)
        return True
