"""Progress lines of the build of a selection's graph."""

from __future__ import annotations

import time
from collections.abc import Callable

from geartrain.ams.values.text import counted

_SECONDS_BETWEEN_LINES = 5.0
_RESUMED_SECONDS = 1.0
"""Time from a build's first report in which pairs of an earlier build, resumed from a folder, are reported."""


class GraphProgressPrinter:
    """Prints the progress of a graph build: every five seconds, and at its end. Use from one thread a build.

    Call it with (done, total).
    """

    def __init__(self, num_classes: int, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._classes = counted(num_classes, "class", "classes")
        self._say = say
        self._clock = clock
        self._started: float | None = None
        self._told = 0.0
        self._done = 0
        self._measured_from = (0.0, 0)
        """Time and pairs from which the speed is measured: resumed pairs took no time."""

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if self._started is None or done < self._done:  # the build before was cancelled
            self._started = self._told = now
        self._done = done
        seconds = now - self._started
        if seconds < _RESUMED_SECONDS:
            self._measured_from = (now, done)
        since, before = self._measured_from
        if done >= total:
            self._started = None
            self._say(f"Graph of {self._classes} built in {seconds:.1f} s")
        elif done > before and now - self._told >= _SECONDS_BETWEEN_LINES:
            self._told = now
            left = (now - since) * (total - done) / (done - before)
            self._say(f"Graph of {self._classes}: {100 * done // total} %, {left:.0f} s left")
