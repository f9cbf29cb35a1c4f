"""Ping: the handler that all roles share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from geartrain.ams.observe.metrics import ADDRESSES
from geartrain.ams.values.rpc import Ping, Pong, version


class PingHandler:
    """Ping handler of one role, which starts now. ``incarnation`` returns that of its process."""

    def __init__(self, role: str, incarnation: Callable[[], int] = lambda: 0) -> None:
        self._role = role
        self._incarnation = incarnation
        self._began = time.monotonic()

    def __call__(self, ping: Ping, call: object) -> Pong:  # noqa: ARG002
        """Answer a ping."""
        return Pong(
            role=self._role,
            version=version(),
            uptime_seconds=time.monotonic() - self._began,
            incarnation=self._incarnation(),
            pid=os.getpid(),
            metrics=", ".join(ADDRESSES),
        )
