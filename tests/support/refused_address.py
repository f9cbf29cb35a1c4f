"""An address that refuses connections for as long as a test needs it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def refused_address() -> Iterator[str]:
    """Hold a port without listening on it, so that no other process of the machine can begin to answer there."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"
