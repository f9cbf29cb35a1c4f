"""Rate limit of each client per second: one count for HTTP and gRPC."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

_MAX_CLIENTS = 10_000
"""Clients that are remembered; the one not seen for longest is dropped."""


class ClientRates:
    """Limits the requests of each client to a rate per second, averaged over more than a second. Thread-safe."""

    def __init__(self, per_second: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second, self._clock = per_second, clock
        self._lock = threading.Lock()
        self._clients: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Client -> (requests it may make, at which time)."""

    def wait(self, client: str) -> float:
        """Count a request, and return 0; or return the seconds until the client may send it."""
        if self._per_second is None:
            return 0.0
        with self._lock:
            now, most = self._clock(), max(1.0, self._per_second)
            may, at = self._clients.pop(client, (most, now))
            may = min(most, may + (now - at) * self._per_second)
            self._clients[client] = (max(0.0, may - 1), now) if may >= 1 else (may, now)
            if len(self._clients) > _MAX_CLIENTS:
                self._clients.popitem(last=False)
            return 0.0 if may >= 1 else (1 - may) / self._per_second

    def sentence(self, wait: float) -> str:
        """Return the message for a throttled client."""
        return (
            f"more than {self._per_second:g} requests per second; ask again in {wait:.2g} s, several items in one "
            "request count once"
        )
