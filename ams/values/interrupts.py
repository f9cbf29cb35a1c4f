"""Work that Ctrl-C must not break off in the middle, done on threads to which it does not come.

Python raises KeyboardInterrupt on the main thread between any two instructions, so also after a lock was taken and
before the ``with`` statement that would give it back has begun (``threading.Condition`` and whatever uses it, such as
futures and gRPC's client). One Ctrl-C there, and every later call waits for ever. So the main thread only waits, in one
call of C code that can be broken off, while another thread does the work.
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

_LOOK_SECONDS = 0.1
"""A signal that comes just before the main thread goes to sleep does not wake it: it looks by itself."""


class _Job(Generic[R]):
    def __init__(self, work: Callable[[], R]) -> None:
        self._work = work
        self._result: list[R] = []
        self._error: BaseException | None = None
        self.is_undone = _thread.allocate_lock()
        """Held until the work is done."""
        self.is_undone.acquire()

    def do(self) -> None:
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
"""Of each thread that waits for a job. As many as were ever at work at once: one, unless calls were broken off."""


carry: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
"""What makes work that another thread does know of what it is a part of; None: nobody asks (see ams/observe/traces)."""


def is_on_main_thread() -> bool:
    """Whether KeyboardInterrupt can be raised here."""
    return threading.get_ident() == threading.main_thread().ident


def shielded(work: Callable[[], R], *, if_broken_off: Callable[[], object] | None = None) -> R:
    """Return what ``work`` returns, or raise what it raises; on the main thread let another thread do it.

    If the wait for it is broken off, ``if_broken_off`` is called; the work goes on, and its outcome is dropped.
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
        while not job.is_undone.acquire(timeout=_LOOK_SECONDS):
            pass
    except BaseException:
        if if_broken_off is not None:
            if_broken_off()
        raise
    return job.outcome()


def _thread_with_nothing_to_do() -> _Jobs | None:
    """Where a thread waits for a job; None: there is none, and none can be had."""
    if _idle:
        return _idle.pop()  # nobody else takes one
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
        job.do()
        _idle.append(jobs)
        job.is_undone.release()
        del job


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)


class BackgroundFuture(Future[Any]):
    """The outcome of ``work``, once another thread has called :meth:`run`. The main thread may wait for it."""

    def __init__(self, work: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self._work = work
        self._is_done = self._is_running = False
        self._outcome: tuple[Any, BaseException | None] | None = None
        """Result or error; None: it was cancelled."""
        self._is_undone = _thread.allocate_lock()
        self._is_undone.acquire()
        super().add_done_callback(_end)  # the first: those after it may ask for the result

    def begin(self) -> bool:
        """Whether the work is to be done: not if it was cancelled. From now on it cannot be."""
        self._is_running = self.set_running_or_notify_cancel()
        return self._is_running

    def run(self) -> None:
        """Do the work, unless it was cancelled."""
        work, self._work = self._work, None
        if work is None or not (self._is_running or self.begin()):
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
        return shielded(super().cancel)

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        shielded(partial(super().add_done_callback, fn))

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
            if self._is_undone.acquire(timeout=min(left, _LOOK_SECONDS)):
                self._is_undone.release()  # if it is not, for an interrupt: it is looked at no more
        if self._outcome is None:
            raise CancelledError
        return self._outcome


def _end(future: Future[Any]) -> None:
    assert isinstance(future, BackgroundFuture)
    future._is_done = True
    future._is_undone.release()


class BrokenOff(ShardUnavailable):
    """The caller has gone: its arrays are its own again. Nobody but the threads that work for it sees this."""


class BufferLease:
    """The right to touch a caller's arrays, which ends when the caller is broken off. Thread-safe.

    Any number of threads may have it at once: they touch different parts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_at_it = 0
        self._waiting: list[threading.Lock] = []
        self.has_ended = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Have it while the block runs. Who takes long looks at :attr:`has_ended`. Raises BrokenOff if it has ended."""
        with self._lock:
            if self.has_ended:
                raise BrokenOff("the caller has gone")
            self._num_at_it += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_at_it -= 1
                waiting = [] if self._num_at_it else self._waiting
            for each in waiting:
                each.release()

    def end(self) -> None:
        """End it: nobody begins any more. Does not wait; see :meth:`wait`."""
        with self._lock:
            self.has_ended = True

    def wait(self) -> None:
        """Wait until nobody is at it any more. Once it has ended."""
        over = threading.Lock()
        with self._lock:
            if not self._num_at_it:
                return
            over.acquire()
            self._waiting.append(over)
        while not over.acquire(timeout=_LOOK_SECONDS):
            pass
