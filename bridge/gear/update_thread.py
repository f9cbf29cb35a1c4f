"""Thread of a slow gear that makes dense updates as gradients become due."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable

from geartrain.ams.values.errors import GeartrainError, InternalError, ModuleFailed

logger = logging.getLogger(__name__)


class UpdateThread:
    """Applies due gradients until it is stopped.

    It ends before the process does, after the current update: torch crashes if the interpreter ends within one.
    """

    def __init__(self, apply_due: Callable[[], bool], count_due: Callable[[], int], *, tick_seconds: float) -> None:
        """Start the thread, which also checks every ``tick_seconds`` for batches that have waited too long.

        ``apply_due`` makes one update, and returns whether one was due; ``count_due`` returns the number of due
        gradients.
        """
        self._apply_due = apply_due
        self._count_due = count_due
        self._tick_seconds = tick_seconds
        self._changed = threading.Condition()
        self._is_awake = self._is_ended = False
        self.error: GeartrainError | None = None
        """Error of the last attempt, which is retried; None: it succeeded."""
        self._thread = threading.Thread(target=self._run, name="geartrain-slow-gear", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def wake(self) -> None:
        """Wake the thread: something may be due."""
        with self._changed:
            self._is_awake = True
            self._changed.notify_all()

    def wait_until_due(self, most: int, longest_seconds: float = 10.0) -> None:
        """Wait, up to ``longest_seconds``, while more than ``most`` gradients are due. Raises the update's error."""
        if self._count_due() <= most:
            return
        deadline = time.monotonic() + longest_seconds
        with self._changed:
            while not self._is_ended and self._count_due() > most and time.monotonic() < deadline:
                if (error := self.error) is not None:
                    raise error
                self._changed.wait(self._tick_seconds)

    def stop(self) -> None:
        """End the thread after the update under way. Idempotent."""
        self.request_stop()
        self._thread.join()

    def request_stop(self) -> None:
        """Ask the thread to end, without waiting for it."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            self._work()
        finally:
            atexit.unregister(self.stop)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_awake or self._is_ended, self._tick_seconds)
                if self._is_ended:
                    return
                self._is_awake = False
            self._apply()
            with self._changed:
                self._changed.notify_all()

    def _apply(self) -> None:
        try:
            while not self._is_ended and self._apply_due():
                self.error = None
        except GeartrainError as exc:
            if self.error is None:
                logger.warning("dense updates fail; retrying: %s", exc, exc_info=isinstance(exc, ModuleFailed))
            self.error = exc
        except (Exception, SystemExit) as exc:  # a bug must not end the thread: it retries
            if self.error is None:
                logger.exception("dense updates fail; retrying")
            self.error = InternalError(f"a dense update failed: {type(exc).__name__}: {exc}")
