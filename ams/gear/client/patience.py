"""How long a fast gear waits for slow gears that do not answer."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from geartrain.ams.values.errors import GearUnavailable

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.05, 0.5


class Patience:
    """Waits between attempts, until the time is used up."""

    def __init__(self, name: str, seconds: Callable[[], float]) -> None:
        self._name = name
        self._seconds = seconds
        self._began: float | None = None
        self._pause = _FIRST_PAUSE_SECONDS
        self._last: Exception | None = None

    def note(self, error: Exception) -> None:
        """Say why an attempt failed."""
        self._last = error

    def pause(self) -> None:
        """Wait a little. Raises GearUnavailable when it has been long enough."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
            logger.warning(
                "slow gears of %r: %s; waiting up to %g s (the ids of one that died are free when its lease ends: "
                "scheduler setting stream_lease_seconds)",
                self._name,
                self._last or "some ids have no holder",
                self._seconds(),
            )
        left = self._began + self._seconds() - now
        if left <= 0:
            raise GearUnavailable(
                f"the slow gears of {self._name!r} did not answer for all ids within {self._seconds():g} s: "
                f"{self._last or 'some partitions have no holder'}. Start them with 'geartrain slowgear', or raise the "
                "client setting recovery_timeout_seconds (it is waited for one and a half leases at least)"
            ) from self._last
        time.sleep(min(left, self._pause * random.uniform(0.5, 1.0)))
        self._pause = min(_LONGEST_PAUSE_SECONDS, self._pause * 2)
