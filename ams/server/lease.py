"""A shard's lease: whether it may still believe that the shard is its own.

A process that was stopped (SIGSTOP, a suspended machine) past its lease may have a successor, and does not know. It
answers nothing until the scheduler has said that it still holds its shard. A scheduler that is merely silent stops
nothing: a process that runs all the time, and whose heartbeats find nobody, serves on.

What remains: a request that was past its last check when the process was stopped is completed after it. A write so
completed changes only rows that nobody reads any more, and is not acknowledged: the lease is checked once more before
a reply is sent. Only the few instructions between that check and the socket cannot be fenced. Nor can a process that
runs but is cut off from the scheduler alone: it cannot tell that from a scheduler that is down.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from geartrain.ams.values.errors import ShardUnavailable

PULSES_PER_LEASE = 10
"""How often a running process says so, at least."""
BEATS_PER_LEASE = 3
"""How many heartbeats fit in a lease, at least."""


def boot_seconds() -> float:
    """Seconds since the machine started. Goes on while it is suspended, where the system has such a clock."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class Lease:
    """What one shard knows of its lease. Thread-safe.

    It lasts ``lease_seconds`` from the *sending* of the last heartbeat that was answered. The process counts as
    stopped if for half of that time nothing of it ran: no pulse, no request.
    """

    def __init__(self, shard: int, lease_seconds: float, clock: Callable[[], float] = boot_seconds) -> None:
        self.seconds = lease_seconds
        self._shard = shard
        self._clock = clock
        self._lock = threading.Lock()
        self._ran = self._began = clock()
        self._refusal: str | None = None
        self._is_revoked = False

    def now(self) -> float:
        """The lease's clock, in seconds."""
        return self._clock()

    def pulse(self) -> None:
        """Note that the process runs."""
        with self._lock:
            self._look()

    def check(self) -> None:
        """Raise ShardUnavailable (the caller may try again) if the shard may belong to another process by now."""
        with self._lock:
            self._look()
            if self._refusal is not None:
                raise ShardUnavailable(self._refusal)

    def confirm(self, began: float) -> None:
        """The scheduler has answered a heartbeat sent at ``began`` that the shard is still this process's."""
        with self._lock:
            self._look()
            self._began = max(self._began, began)
            # An answer from before a stop may wait in the socket: it is no newer for that.
            if not self._is_revoked and self._ran <= self._began + self.seconds:
                self._refusal = None

    def revoke(self, reason: str) -> None:
        """The shard is another process's: answer nothing any more."""
        with self._lock:
            self._is_revoked = True
            self._refusal = reason

    def _look(self) -> None:
        now = self._clock()
        gap = now - self._ran
        self._ran = now
        if self._refusal is None and gap > self.seconds / 2 and now > self._began + self.seconds:
            self._refusal = (
                f"shard {self._shard} was stopped for {gap:.1f} s and its lease of {self.seconds:g} s ran out "
                "meanwhile; it asks the scheduler first whether another process holds the shard now"
            )
