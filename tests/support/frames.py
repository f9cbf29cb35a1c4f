"""Frames of other threads, for tests that wait until a thread is at some place."""

from __future__ import annotations

import gc
import sys
from types import FrameType


def frames() -> dict[int, FrameType]:
    """Return the present frame of each thread.

    Without garbage collection meanwhile: CPython holds a lock here, on which a callback of ``gc`` (Hypothesis has one)
    would wait for ever.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()
