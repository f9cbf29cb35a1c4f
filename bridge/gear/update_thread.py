"""The thread of a slow gear that makes dense updates as gradients become due."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable

from geartrain.ams.values.errors import GeartrainError, InternalError, ModuleFailed

logger = logging.getLogger(__name__)


class UpdateThread:
    """Applies what is due, again and again, until it is stopped.

    At the end of the process, if not before, it ends after the update under way: torch does not survive being torn
    out of one.
    """

    def __init__(self, apply_due: Callable[[], bool], count_due: Callable[[], int], *, tick_seconds: float) -> None:
        """``apply_due`` makes one update, and says whether one was due; ``count_due`` says how many gradients are. It
        looks every ``tick_seconds`` for batches that have waited too long."""
        self._apply_due = apply_due
        self._count_due = count_due
        self._tick_seconds = tick_seconds
        self._changed = threading.Condition()
        self._is_awake = self._is_ended = False
        self.error: GeartrainError | None = None
        """Why the last attempt failed; it is repeated."""
        self._thread = threading.Thread(target=self._run, name="geartrain-slow-gear", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def wake(self) -> None:
        """Say that something may be due."""
        with self._changed:
            self._is_awake = True
            self._changed.notify_all()

    def wait_until_due(self, most: int, longest_seconds: float = 10.0) -> None:
        """Wait, for so long, while more than ``most`` gradients are due. Raises why, if they are not applied."""
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
        """As :meth:`stop`, without waiting for it."""
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
                logger.warning("dense updates wait: %s", exc, exc_info=isinstance(exc, ModuleFailed))
            self.error = exc
        except Exception as exc:  # a defect of ours must not end the thread: it is tried again
            if self.error is None:
                logger.exception("dense updates wait")
            self.error = InternalError(f"a dense update failed: {type(exc).__name__}: {exc}")
