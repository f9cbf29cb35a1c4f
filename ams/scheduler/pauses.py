"""Notices that this process itself was stopped: nobody could be heard meanwhile, so nobody may be called dead."""

from __future__ import annotations

from collections.abc import Callable


class PauseDetector:
    """Whether the process was stopped for longer than ``longest_seconds``. Notices nothing until pulses begin."""

    def __init__(self, longest_seconds: float, clock: Callable[[], float]) -> None:
        self._longest_seconds = longest_seconds
        self._clock = clock
        self._ran: float | None = None

    def pulse(self) -> bool:
        """Note that the process runs, several times in ``longest_seconds``; return :meth:`was_stopped`."""
        stopped = self.was_stopped()
        self._ran = self._clock()
        return stopped

    def was_stopped(self) -> bool:
        """Return whether it was stopped since the last pulse; True once for each stop."""
        now = self._clock()
        stopped = self._ran is not None and now - self._ran > self._longest_seconds
        if stopped:
            self._ran = now
        return stopped
