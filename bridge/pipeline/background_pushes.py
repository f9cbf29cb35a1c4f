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

    After an error it sends nothing more, and keeps all unsent pushes. The error is raised once, by the next step,
    look-up, snapshot or end of the loop. The step after that resends them, each push exactly once; :meth:`drop` drops
    them. Used by one thread, beside its own.
    """

    def __init__(self) -> None:
        self._unsent: deque[Sequence[RowWrite]] = deque()
        """Pushes of each step that is not sent completely, oldest first."""
        self._wakeups: queue.SimpleQueue[bool] = queue.SimpleQueue()  # Ctrl-C cannot leave a lock of it locked
        self._progress: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_raised = False
        self.is_closed = False

    @property
    def is_clean(self) -> bool:
        """Whether every push was applied or dropped."""
        return not self._unsent

    def submit(self, writes: Sequence[RowWrite]) -> None:
        """Queue the pushes of one step. Not to be called while an error waits to be raised."""
        for write in writes:
            write.announce()
        self._unsent.append(writes)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, args=(self._wakeups,), name="geartrain-prefetch-push", daemon=True
            )
            uninterrupted(self._thread.start)
        self._wakeups.put(True)
        if self.is_closed:  # perhaps before this call: then the thread ends without sending them
            self._send_rest()

    def _send_rest(self) -> None:
        """Send the unsent pushes from the caller's thread, once the background thread has ended."""
        assert self._thread is not None
        self._thread.join()
        while self._unsent and self._error is None:
            try:
                _send(self._unsent[0])
            except GeartrainError as exc:
                self._error = exc
            else:
                self._unsent.popleft()

    def wait(self, most: int = 0) -> None:
        """Wait until the pushes of at most ``most`` steps are unsent. If an error prevents that, raises it, once."""
        while len(self._unsent) > most and self._error is None:
            try:
                self._progress.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
        if len(self._unsent) > most and self._error is not None and not self._is_raised:
            self._is_raised = True
            error = self._error
            try:
                raise error
            finally:
                del error  # otherwise it would keep itself alive through this frame

    def raise_or_retry(self) -> None:
        """Raise an error that was not raised yet; after one that was, resend. To be called before a step."""
        if self._error is None:
            return
        self.wait()
        while self._unsent:
            _send(self._unsent[0])
            self._unsent.popleft()
        self._reset()

    def drop(self) -> None:
        """Drop the unsent pushes after an error that was raised."""
        if self._is_raised:
            for writes in self._unsent:
                for write in writes:
                    write.abandon()
            self._unsent.clear()
            self._reset()

    def close(self, timeout_seconds: float | None = None) -> None:
        """Make the thread send the unsent pushes and end; wait up to ``timeout_seconds`` for it. Idempotent."""
        self.is_closed = True
        self._wakeups.put(False)
        thread = self._thread
        if thread is not None and thread.ident is not None and not is_stage():
            thread.join(timeout_seconds)

    def _reset(self) -> None:
        self._error, self._is_raised = None, False
        self._thread, self._wakeups = None, queue.SimpleQueue()

    def _work(self, wakeups: queue.SimpleQueue[bool]) -> None:
        mark_as_stage()
        while wakeups.get():
            try:
                _send(self._unsent[0])
            except BaseException as exc:  # raised by the thread that waits
                self._error = exc
                self._progress.put(None)
                return
            self._unsent.popleft()
            self._progress.put(None)


def _send(writes: Sequence[RowWrite]) -> None:
    left = [write for write in writes if not write.is_sent]
    if left:
        left[0].send_with(left[1:])
