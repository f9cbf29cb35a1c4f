"""Non-blocking row calls: sent at once, and completed by one thread of the cluster.

Cost: the caller sends. The replies of all calls come to one thread, which holds the interpreter lock only while it
settles a future. Retries, and callbacks, which may wait for other futures, run on the client's background threads.
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
from geartrain.ams.values.interrupts import BackgroundFuture, uninterrupted

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
"""Interval at which the thread checks for unresponsive shards, and whether it is still needed."""


class PreparedCall(NamedTuple):
    """A checked call, not yet sent. Both functions hold the caller's arrays."""

    send: Callable[[RowFuture], bool]
    """Sends it for the given future. False: too many calls are in flight, so it must wait."""
    finish: Callable[[Any], Any]
    """Makes the result from the compiled code's reply, or raises; retries where that can help."""
    abandon: Callable[[], None] = lambda: None
    """Drops the call before it was sent."""


class RowFuture(BackgroundFuture):
    """Future of a row call."""

    def __init__(self, futures: RowFutures) -> None:
        super().__init__()
        self.call: PreparedCall | None = None
        """None once it is settled."""
        self._futures = futures

    def send_at_once(self) -> bool:
        """:meth:`send`, before any other thread knows this future."""
        self._is_running = True
        self._is_running = self.send()
        return self._is_running

    def send(self) -> bool:
        assert self.call is not None
        return self.call.send(self)

    def resolve(self, reply: Any) -> None:
        """Set the result from the reply."""
        assert self.call is not None
        self._work, self.call = partial(self.call.finish, reply), None
        self.run()

    def fail(self, error: BaseException) -> None:
        """Set the error of a call that cannot be sent."""
        self._work, self.call = partial(_raise, error), None
        self.run()

    def cancel(self) -> bool:
        """Cancel a call that is still queued; return whether it was."""
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
    """Non-blocking calls of one cluster. Thread-safe.

    Compiled code limits the calls in flight; others are queued, and sent in order.
    """

    def __init__(
        self,
        client: RowsClient,
        elsewhere: Callable[[Callable[[], object]], object],
        settle: Callable[[Callable[[], object]], object],
        watch: Callable[[list[int]], object],
    ) -> None:
        """``elsewhere`` runs work that may block, also on the number of a write; ``settle`` runs work that may block,
        but not on a number, as other work waits for it. ``watch`` is called now and then with the shards that have been
        silent for a while.
        """
        self._client = client
        self._elsewhere, self._settle, self._watch = elsewhere, settle, watch
        self._open: set[RowFuture] = set()
        """Futures that are not settled."""
        self._line: deque[RowFuture] = deque()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self, prepare: Callable[[], PreparedCall]) -> RowFuture:
        """Return the future of a call, which is sent now, or once others have ended. An error of ``prepare`` becomes
        the future's. Raises Unavailable once closed.
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
                uninterrupted(self._start)
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
        """Run a user's callback, not on the thread that it may wait for."""
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
        next_look = time.monotonic() + _POLL_SECONDS
        while not self._is_over():
            reply = self._client.next_reply(_POLL_SECONDS)
            if reply is not None:
                self._resolve(*reply)
            self._send_line()
            if time.monotonic() >= next_look:
                self._watch(self._client.waiting(_POLL_SECONDS))
                next_look = time.monotonic() + _POLL_SECONDS

    def _is_over(self) -> bool:
        """Return whether the thread ends. A call made after the main thread has ended starts it again."""
        if self._open or not (self._is_closed or not threading.main_thread().is_alive()):
            return False
        with self._lock:
            thread, self._thread = self._thread, None
            if self._open:  # a new call sees no thread, and waits for the lock
                self._thread = thread
        return self._thread is None

    def _resolve(self, future: RowFuture, reply: Any) -> None:
        """Settle a future whose call has ended, or whose first attempt has."""
        self._open.discard(future)  # close waits for this thread, then for the background work
        if reply is None or isinstance(reply, tuple):
            future.resolve(reply)
            return
        try:
            self._settle(partial(future.resolve, reply))
        except Exception as exc:  # no thread is available
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
