"""Work beside the training, on threads that end before the interpreter does."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any

_SECONDS_TO_END = 30.0
_cancels: dict[threading.Thread, Callable[[], None]] = {}
_lock = threading.Lock()


def start_in_background(
    work: Callable[..., None], arguments: tuple[Any, ...], cancel: Callable[[], None], name: str
) -> None:
    """Run ``work(*arguments)`` on a thread of its own.

    A process that ends meanwhile calls ``cancel`` and waits up to 30 s for the work to end: a thread that comes back
    from compiled code to an interpreter that is gone aborts the whole process.
    """

    def run() -> None:
        try:
            work(*arguments)
        finally:
            with _lock:
                del _cancels[thread]

    thread = threading.Thread(target=run, name=name, daemon=True)
    with _lock:
        thread.start()
        _cancels[thread] = cancel


@atexit.register
def _end_all() -> None:
    with _lock:
        running = dict(_cancels)
    for cancel in running.values():
        cancel()
    for thread in running:
        thread.join(_SECONDS_TO_END)
