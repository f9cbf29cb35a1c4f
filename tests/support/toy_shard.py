"""A shard without rows behind a server of the data plane, and ways to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from geartrain.ams.kernels import _core
from tests.support.frame_calls import ask, dial, pull

SOON = 10.0
"""Seconds in which what must happen has happened, however busy the machine."""


class Shard:
    """A toy handler behind a server, and one way to it."""

    def __init__(self, way: str = "ring", **limits: Any) -> None:
        self.way = way
        self.handler = _core.ToyHandler()
        self.server = _core.DataServer(self.handler, host="127.0.0.1", uses_tls=way == "tls", **limits)

    def connect(self, **limits: Any) -> _core.DataConnection:
        return dial(self.way, *self.server.offer(), **limits)

    def connect_ring(self, **limits: Any) -> _core.RingConnection:
        name, secret, _ = self.server.offer()
        return _core.connect_ring(name, secret, SOON, **limits)

    def told(self) -> list[str]:
        """An offer, as another process is told it."""
        name, secret, port = self.server.offer()
        return [self.way, name, secret.hex(), str(port)]


def until(condition: Callable[[], bool], other: _core.DataConnection) -> None:
    """Call the shard until ``condition`` holds: between calls it looks at its sockets."""
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline
        ask(other, pull("rows", [1]))
