"""Key-value rendezvous of a job's processes through the scheduler."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import TypeVar

from geartrain.ams.rpc.carrier import AttemptFailed, remedy
from geartrain.ams.rpc.client.backoff import Backoff
from geartrain.ams.rpc.client.dial import dial
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import SchedulerUnavailable
from geartrain.ams.values.rpc import Rpc
from geartrain.ams.values.scheduler_messages import ReadRendezvous, RendezvousValue, WriteRendezvous

R = TypeVar("R")

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.005, 0.25


class RendezvousValues:
    """Values of one job: bytes under keys. Thread-safe.

    Each method retries for ``recovery_timeout_seconds`` while the scheduler does not answer, then raises
    SchedulerUnavailable. A scheduler that is restarted meanwhile has forgotten all values.
    """

    def __init__(self, scheduler: str, job: str, config: ClientConfig | None = None) -> None:
        """Use the scheduler at ``"host:port"``; sends nothing yet. Raises ConfigError."""
        self._config = config or ClientConfig()
        self._scheduler, _ = dial(scheduler, self._config)
        self._job = job

    def read(self, keys: Sequence[str]) -> tuple[RendezvousValue, ...]:
        """Return the value of each key."""
        return self._asked(ReadRendezvous(job=self._job, keys=tuple(keys)))

    def write(
        self, key: str, value: bytes | None = None, *, expected: int | None = None, add: int | None = None
    ) -> tuple[RendezvousValue, bool]:
        """Set a key (None: remove) or ``add`` to it, if ``expected`` is None or its present version.

        Returns the value afterwards, and whether this call wrote it.
        """
        version = secrets.randbits(63) | 1
        write = WriteRendezvous(job=self._job, key=key, version=version, value=value, expected=expected, add=add)
        now = self._asked(write)
        return now, now.version in ((0, version) if value is None and add is None else (version,))

    def wait(self, keys: Sequence[str], seconds: float) -> tuple[bytes, ...] | None:
        """Return the values once every key has one; None if that takes longer."""
        start = time.monotonic()
        while True:
            values = [found.value for found in self.read(keys)]
            there = tuple(value for value in values if value is not None)
            waited = time.monotonic() - start
            if len(there) == len(values):
                return there
            if waited >= seconds:
                return None
            time.sleep(min(max(waited / 8, _SHORTEST_PAUSE), _LONGEST_PAUSE, seconds - waited))

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._scheduler.close()

    def _asked(self, request: Rpc[R]) -> R:
        backoff = Backoff(self._config.recovery_timeout_seconds, longest_pause_seconds=1.0)
        while True:
            try:
                return self._scheduler.call(request, self._config.attempt_timeout_seconds)
            except AttemptFailed as exc:
                if not backoff.pause():
                    raise SchedulerUnavailable(
                        f"{exc} (for {backoff.seconds:g} s), where the processes of job {self._job!r} find each "
                        f"other; {remedy(exc)}"
                    ) from None
