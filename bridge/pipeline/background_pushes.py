"""Pushes of steps, sent by a background thread while the next step is computed."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence

from geartrain.ams.client.writes import RowWrite
from geartrain.ams.values.errors import GeartrainError
from geartrain.ams.values.interrupts import uninterrupted
from geartrain.bridge.pipeline.stages import is_stage, mark_as_stage

_POLL_SECONDS = 0.1


class BackgroundPushes:
    """Sends pushes in the order of their steps, those of a step in one request to each shard.

    After an error nothing more is sent, and nothing is lost: the error is raised once, at the next step, look-up,
    snapshot or end of the loop. The step after that sends what is left again, each push exactly once; :meth:`drop`
    drops it. Used by one thread, beside its own.
    """

    def __init__(self) -> None:
        self._left: deque[Sequence[RowWrite]] = deque()
        """Pushes of steps that are not all sent, the oldest first."""
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()  # Ctrl-C cannot leave a lock of it locked
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_raised = False
        self.is_closed = False

    @property
    def is_clean(self) -> bool:
        """Whether every push was applied, or dropped."""
        return not self._left

    def submit(self, writes: Sequence[RowWrite]) -> None:
        """Queue the pushes of one step. There must be no error."""
        for write in writes:
            write.announce()
        self._left.append(writes)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, args=(self._orders,), name="geartrain-prefetch-push", daemon=True
            )
            uninterrupted(self._thread.start)
        self._orders.put(True)
        if self.is_closed:  # perhaps closed before the submit, which the thread then does not see
            self._send_rest()

    def _send_rest(self) -> None:
        """Send what is left from this thread, after the other has ended."""
        assert self._thread is not None
        self._thread.join()
        while self._left and self._error is None:
            try:
                _send(self._left[0])
            except GeartrainError as exc:
                self._error = exc
            else:
                self._left.popleft()

    def wait(self, most: int = 0) -> None:
        """Wait until the pushes of at most ``most`` steps are left. Raises an error that was not raised before, if more
        stay because of it.
        """
        while len(self._left) > most and self._error is None:
            try:
                self._news.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
        if len(self._left) > most and self._error is not None and not self._is_raised:
            self._is_raised = True
            error = self._error
            try:
                raise error
            finally:
                del error  # otherwise it would keep itself alive through this frame

    def raise_or_retry(self) -> None:
        """Raise an error that was not raised before; otherwise resend what is left. Called before a step."""
        if self._error is None:
            return
        self.wait()
        while self._left:
            _send(self._left[0])
            self._left.popleft()
        self._reset()

    def drop(self) -> None:
        """Drop what is left after an error that was raised."""
        if self._is_raised:
            for writes in self._left:
                for write in writes:
                    write.abandon()
            self._left.clear()
            self._reset()

    def close(self, timeout_seconds: float | None = None) -> None:
        """Send what is left, then end the thread; wait for it up to ``timeout_seconds``. Idempotent."""
        self.is_closed = True
        self._orders.put(False)
        thread = self._thread
        if thread is not None and thread.ident is not None and not is_stage():
            thread.join(timeout_seconds)

    def _reset(self) -> None:
        self._error, self._is_raised = None, False
        self._thread, self._orders = None, queue.SimpleQueue()

    def _work(self, orders: queue.SimpleQueue[bool]) -> None:
        mark_as_stage()
        while orders.get():
            try:
                _send(self._left[0])
            except BaseException as exc:  # raised by the thread that waits
                self._error = exc
                self._news.put(None)
                return
            self._left.popleft()
            self._news.put(None)


def _send(writes: Sequence[RowWrite]) -> None:
    left = [write for write in writes if not write.is_sent]
    if left:
        left[0].send_with(left[1:])
