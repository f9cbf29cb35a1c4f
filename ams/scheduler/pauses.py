"""Detector of pauses of this process: it received no heartbeats meanwhile, so no peer may be declared dead."""

from __future__ import annotations

from collections.abc import Callable


class PauseDetector:
    """Calls ``on_pause`` if the process was stopped for longer than ``longest_seconds``. Notices nothing until pulses
    begin."""

    def __init__(self, longest_seconds: float, clock: Callable[[], float], on_pause: Callable[[], None]) -> None:
        self._longest_seconds = longest_seconds
        self._clock = clock
        self._on_pause = on_pause
        self._ran: float | None = None

    def pulse(self) -> None:
        """Record that the process runs, several times in ``longest_seconds``, and :meth:`notice`."""
        self.notice()
        self._ran = self._clock()

    def notice(self) -> None:
        """Check for a pause since the last pulse; each is reported once."""
        now = self._clock()
        if self._ran is not None and now - self._ran > self._longest_seconds:
            self._ran = now
            self._on_pause()
