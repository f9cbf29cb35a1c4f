"""Retry with backoff and a time limit: one policy for shards, slow gears and the graph service."""

from __future__ import annotations

import random
import threading
import time

_FIRST_PAUSE_SECONDS = 0.05


class Backoff:
    """Pauses between attempts, growing, until the time is used up. For one caller: not thread-safe."""

    def __init__(
        self, seconds: float, *, longest_pause_seconds: float = 1.0, given_up: threading.Event | None = None
    ) -> None:
        """``given_up``, once set, ends all pauses at once."""
        self.seconds = seconds
        self.error: Exception | None = None
        """Error of the last attempt, if the caller records it."""
        self._longest_pause = longest_pause_seconds
        self._given_up = given_up or threading.Event()
        self._began: float | None = None
        self._has_paused = False
        self._pause = _FIRST_PAUSE_SECONDS

    @property
    def is_fresh(self) -> bool:
        """Whether there was no pause yet."""
        return not self._has_paused and self.seconds > 0

    def count_from(self, moment: float) -> None:
        """Count the time from this moment (of time.monotonic), if it is the latest, instead of the first failure."""
        self._began = moment if self._began is None else max(self._began, moment)

    def reset(self) -> None:
        """Reset after an answer. Pauses briefly, since others got their answers at the same time."""
        self._began, self._has_paused, self._pause = None, False, _FIRST_PAUSE_SECONDS
        self._given_up.wait(self._pause * random.uniform(0.5, 1.0))

    def pause(self, at_least_seconds: float = 0.0) -> bool:
        """Wait before the next attempt and return True; return False if the time is used up."""
        now = time.monotonic()
        if self._began is None:  # counted from the first failure
            self._began = now
        left = self._began + self.seconds - now
        if left <= 0:
            return False
        self._has_paused = True
        # Jitter keeps the workers of a job from retrying all at once.
        wait = max(self._pause * random.uniform(0.5, 1.0), at_least_seconds * random.uniform(1.0, 1.5))
        self._given_up.wait(min(left, wait))
        self._pause = min(self._longest_pause, self._pause * 2)
        return True
