"""Calls that Ctrl-C must not interrupt midway, run on threads without KeyboardInterrupt.

Python raises KeyboardInterrupt on the main thread between any two instructions, so also after a lock was acquired and
before the ``with`` statement that releases it has begun (``threading.Condition`` and its users, such as futures and
gRPC's client). After one Ctrl-C there, every later call waits for ever. So the main thread only waits, in one
interruptible call of C code, while another thread does the work.
"""

from __future__ import annotations

import _thread
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar

from geartrain.ams.values.errors import ShardUnavailable

R = TypeVar("R")

_POLL_SECONDS = 0.1
"""Polling interval of the main thread: a signal just before it sleeps does not wake it."""


class _Job(Generic[R]):
    def __init__(self, work: Callable[[], R]) -> None:
        self._work = work
        self._result: list[R] = []
        self._error: BaseException | None = None
        self.is_undone = _thread.allocate_lock()
        """Lock held until the work is done."""
        self.is_undone.acquire()

    def run(self) -> None:
        try:
            self._result.append(self._work())
        except BaseException as exc:  # raised where the work was asked for
            self._error = exc

    def outcome(self) -> R:
        error, self._error = self._error, None  # or the error would hold itself, by way of its frames
        if error is None:
            return self._result[0]
        try:
            raise error
        finally:
            del error


_Jobs = queue.SimpleQueue[_Job[object]]
_idle: list[_Jobs] = []
"""Queues of the idle threads. As many as were ever busy at once: one, unless calls were interrupted."""


carry: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
"""Wrapper that gives work on another thread the context of its caller; None: no tracing (see ams/observe/traces)."""


def is_on_main_thread() -> bool:
    """Return whether KeyboardInterrupt can be raised on this thread."""
    return threading.get_ident() == threading.main_thread().ident


def uninterrupted(work: Callable[[], R], *, on_interrupt: Callable[[], object] | None = None) -> R:
    """Call ``work``, on the main thread by way of another thread; return its result or raise its error.

    If the wait is interrupted, ``on_interrupt`` is called; the work goes on, and its outcome is dropped.
    """
    if not is_on_main_thread() or sys.is_finalizing():
        return work()
    jobs = _thread_with_nothing_to_do()
    if jobs is None:
        return work()
    carried: Callable[[], R] = work if carry is None else carry(work)
    job = _Job(carried)
    try:
        jobs.put(job)  # type: ignore[arg-type]
        while not job.is_undone.acquire(timeout=_POLL_SECONDS):
            pass
    except BaseException:
        if on_interrupt is not None:
            on_interrupt()
        raise
    return job.outcome()


def _thread_with_nothing_to_do() -> _Jobs | None:
    """Return the queue of an idle thread; None: there is none, and none can be started."""
    if _idle:
        return _idle.pop()  # only the main thread pops
    jobs: _Jobs = queue.SimpleQueue()
    try:
        # Not threading.Thread: to start one is to wait for it in Python, where an interrupt would leave it stuck.
        _thread.start_new_thread(_work_off, (jobs,))
    except RuntimeError:
        return None
    return jobs


def _work_off(jobs: _Jobs) -> None:
    while True:
        job = jobs.get()
        job.run()
        _idle.append(jobs)
        job.is_undone.release()
        del job


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)


class BackgroundFuture(Future[Any]):
    """Future of ``work``, once another thread has called :meth:`run`. The main thread may wait for it."""

    def __init__(self, work: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._work = work
        self._is_done = self._is_running = False
        self._outcome: tuple[Any, BaseException | None] | None = None
        """Result or error; None: not done, or cancelled."""
        self._is_undone = _thread.allocate_lock()
        self._is_undone.acquire()
        super().add_done_callback(_mark_done)  # the first: those after it may ask for the result

    def start(self) -> bool:
        """Return whether the work is to be done: not if it was cancelled. From now on it cannot be cancelled."""
        self._is_running = self.set_running_or_notify_cancel()
        return self._is_running

    def run(self) -> None:
        """Do the work, unless it was cancelled."""
        work, self._work = self._work, None
        if work is None or not (self._is_running or self.start()):
            return
        try:
            result = work()
        except BaseException as exc:  # as an executor does it
            self._outcome = None, exc
            self.set_exception(exc)
            self = work = None  # type: ignore[assignment]  # or the error would hold both, by way of this frame
        else:
            self._outcome = result, None
            self.set_result(result)

    def done(self) -> bool:
        return self._is_done

    def running(self) -> bool:
        return self._is_running and not self._is_done

    def cancelled(self) -> bool:
        return self._is_done and self._outcome is None

    def cancel(self) -> bool:
        return uninterrupted(super().cancel)

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        uninterrupted(partial(super().add_done_callback, fn))

    def result(self, timeout: float | None = None) -> Any:
        result, error = self._awaited(timeout)
        if error is None:
            return result
        try:
            raise error
        finally:
            self = error = None  # type: ignore[assignment]  # or the error would hold itself, by way of this frame

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._awaited(timeout)[1]

    def _awaited(self, timeout: float | None) -> tuple[Any, BaseException | None]:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self._is_done:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            if self._is_undone.acquire(timeout=min(left, _POLL_SECONDS)):
                self._is_undone.release()  # skipped by an interrupt, it does no harm: the lock is not used again
        if self._outcome is None:
            raise CancelledError
        return self._outcome


def _mark_done(future: Future[Any]) -> None:
    assert isinstance(future, BackgroundFuture)
    future._is_done = True
    future._is_undone.release()


class CallerGone(ShardUnavailable):
    """The caller was interrupted and owns its arrays again. Only threads that work for it see this."""


class BufferLease:
    """Permission to access a caller's arrays, which ends when the caller is interrupted. Thread-safe.

    Any number of threads may hold it at once: they access different parts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_at_it = 0
        self._waiting: list[threading.Lock] = []
        self.has_ended = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold it during the block. Long work checks :attr:`has_ended`. Raises CallerGone if it has ended."""
        with self._lock:
            if self.has_ended:
                raise CallerGone("the caller stopped waiting")
            self._num_at_it += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_at_it -= 1
                waiting = [] if self._num_at_it else self._waiting
            for each in waiting:
                each.release()

    def revoke(self) -> None:
        """End it: no thread acquires it any more. Does not wait; see :meth:`wait`."""
        with self._lock:
            self.has_ended = True

    def wait(self) -> None:
        """Wait until no thread holds it any more. To be called after :meth:`revoke`."""
        over = threading.Lock()
        with self._lock:
            if not self._num_at_it:
                return
            over.acquire()
            self._waiting.append(over)
        while not over.acquire(timeout=_POLL_SECONDS):
            pass
