"""Calls for rows whose callers do not wait: sent at once, and brought to their end by one thread of the cluster.

Cost: who makes a call sends it. The replies of all calls come to one thread, which holds the interpreter lock only
while it settles a future. What the first attempt does not bring to its end, and callbacks, which may wait for other
futures, are left to the threads of the client's background.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from geartrain.ams.kernels._core import RowsClient
from geartrain.ams.values.errors import Unavailable
from geartrain.ams.values.interrupts import BackgroundFuture, shielded

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1
"""The thread looks so often for shards that are silent, and whether it is needed still."""


class PreparedCall(NamedTuple):
    """A call, checked, and not sent yet. Both hold the caller's arrays."""

    send: Callable[[RowFuture], bool]
    """Sends it, for the future that it gets. False: so much is under way that it has to wait for others to end."""
    finish: Callable[[Any], Any]
    """Makes the result of what compiled code says the call came to, or raises; asks again where that can help."""
    abandon: Callable[[], None] = lambda: None
    """Gives it up before it was sent."""


class RowFuture(BackgroundFuture):
    """The outcome of a call for rows."""

    def __init__(self, futures: RowFutures) -> None:
        super().__init__()
        self.call: PreparedCall | None = None
        """None: it is settled."""
        self._futures = futures

    def send_at_once(self) -> bool:
        """:meth:`send`, while nobody else has this."""
        self._is_running = True
        self._is_running = self.send()
        return self._is_running

    def send(self) -> bool:
        assert self.call is not None
        return self.call.send(self)

    def resolve(self, reply: Any) -> None:
        """Make the result of what the call came to."""
        assert self.call is not None
        self._work, self.call = partial(self.call.finish, reply), None
        self.run()

    def fail(self, error: BaseException) -> None:
        """It cannot be sent."""
        self._work, self.call = partial(_raise, error), None
        self.run()

    def cancel(self) -> bool:
        """See :class:`concurrent.futures.Future`: only what stands in line can be cancelled."""
        if self._is_running or not super().cancel():
            return False
        if self.call is not None:
            self.call.abandon()
        return True

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        super().add_done_callback(partial(self._futures.run_callback, fn))


def _raise(error: BaseException) -> None:
    raise error


class RowFutures:
    """The calls of one cluster. Thread-safe.

    So many are under way at once as compiled code allows; the others stand in line, and are sent in their order.
    """

    def __init__(
        self,
        client: RowsClient,
        elsewhere: Callable[[Callable[[], object]], object],
        settle: Callable[[Callable[[], object]], object],
        watch: Callable[[list[int]], object],
    ) -> None:
        """``elsewhere`` has work done that may wait, also for the number of a write; ``settle`` has work done that may
        wait, but for none: others wait for what it ends. ``watch`` is told now and then of the shards that have been
        silent for a while.
        """
        self._client = client
        self._elsewhere, self._settle, self._watch = elsewhere, settle, watch
        self._open: set[RowFuture] = set()
        """Those that are not settled."""
        self._line: deque[RowFuture] = deque()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self, prepare: Callable[[], PreparedCall]) -> RowFuture:
        """Return the future of a call, which is sent now, or once others have ended. What ``prepare`` raises is its
        error. Raises Unavailable once closed.
        """
        future = RowFuture(self)
        try:
            future.call = prepare()
        except Exception as exc:
            future.fail(exc)
            return future
        try:
            self._open.add(future)
            if self._thread is None:
                shielded(self._start)
            if self._is_closed:
                raise Unavailable("this cluster is being closed")
            if not self._line and future.send_at_once():
                return future
        except BaseException:
            self._open.discard(future)
            raise
        self._line.append(future)
        self._client.nudge()
        return future

    def run_callback(self, fn: Callable[[Future[Any]], object], future: Future[Any]) -> None:
        """Call what somebody has asked to be called: not on the thread that he may wait for."""
        if threading.current_thread() is self._thread:
            self._elsewhere(partial(_logged, fn, future))
        else:
            fn(future)

    def close(self) -> None:
        """Wait until all calls are settled. Later ones are refused. Idempotent."""
        self._is_closed = True
        self._client.nudge()
        thread = self._thread
        if thread is not None:
            thread.join()

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                # No daemon: it would be in compiled code when the interpreter ends.
                thread = threading.Thread(target=self._work, name="geartrain-replies", daemon=False)
                thread.start()
                self._thread = thread

    def _work(self) -> None:
        next_look = time.monotonic() + _LOOK_SECONDS
        while not self._is_over():
            reply = self._client.next_reply(_LOOK_SECONDS)
            if reply is not None:
                self._resolve(*reply)
            self._send_line()
            if time.monotonic() >= next_look:
                self._watch(self._client.waiting(_LOOK_SECONDS))
                next_look = time.monotonic() + _LOOK_SECONDS

    def _is_over(self) -> bool:
        """Whether the thread ends. It is begun anew where a call is made once the main thread has ended."""
        if self._open or not (self._is_closed or not threading.main_thread().is_alive()):
            return False
        with self._lock:
            thread, self._thread = self._thread, None
            if self._open:  # whoever begins now sees no thread, and waits for the lock
                self._thread = thread
        return self._thread is None

    def _resolve(self, future: RowFuture, reply: Any) -> None:
        """Settle a future whose call has come to its end, or has not by its first attempt."""
        self._open.discard(future)  # who closes waits for this thread, and then for those elsewhere
        if reply is None or isinstance(reply, tuple):
            future.resolve(reply)
            return
        try:
            self._settle(partial(future.resolve, reply))
        except Exception as exc:  # no thread is to be had
            future.fail(exc)

    def _send_line(self) -> None:
        while self._line:
            future = self._line[0]
            try:
                if not future.running() and not future.start():
                    self._open.discard(future)  # it was cancelled
                elif not future.send():
                    return
            except Exception as exc:
                self._open.discard(future)
                future.fail(exc)
            self._line.popleft()


def _logged(fn: Callable[[Future[Any]], object], future: Future[Any]) -> None:
    try:
        fn(future)
    except Exception:
        logger.exception("exception calling callback for %r", future)
