"""Signals of commands that write files."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def exiting_in_order() -> Iterator[None]:
    """Let SIGTERM raise SystemExit meanwhile, so that what is half written is removed."""
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
