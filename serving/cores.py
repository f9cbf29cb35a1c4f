"""How many threads of this process work on one batch."""

from __future__ import annotations

import os

_wished: int | None = None


def use_threads(threads: int | None) -> None:
    """Say how many, for models that are loaded from now on; None: as many as there are CPUs."""
    global _wished
    _wished = threads


def threads_of_batch() -> int:
    """How many."""
    return _wished or len(os.sched_getaffinity(0))
