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
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Generic, TypeVar

from geartrain.ams.errors import ShardUnavailable

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


def is_on_main_thread() -> bool:
    """Whether KeyboardInterrupt can be raised here."""
    return threading.get_ident() == threading.main_thread().ident


def aside(work: Callable[[], R], *, if_broken_off: Callable[[], object] | None = None) -> R:
    """Return what ``work`` returns, or raise what it raises; on the main thread let another thread do it.

    If the wait for it is broken off, ``if_broken_off`` is called; the work goes on, and its outcome is dropped.
    """
    if not is_on_main_thread() or sys.is_finalizing():
        return work()
    job = _Job(work)
    try:
        _thread_with_nothing_to_do().put(job)  # type: ignore[arg-type]
        while not job.is_undone.acquire(timeout=_LOOK_SECONDS):
            pass
    except RuntimeError:  # no thread is to be had
        return work()
    except BaseException:
        if if_broken_off is not None:
            if_broken_off()
        raise
    return job.outcome()


def _thread_with_nothing_to_do() -> _Jobs:
    if _idle:
        return _idle.pop()  # nobody else takes one
    jobs: _Jobs = queue.SimpleQueue()
    # Not threading.Thread: to start one is to wait for it in Python, where an interrupt would leave it stuck.
    _thread.start_new_thread(_work_off, (jobs,))
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

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__()
        self._work: Callable[[], Any] | None = work
        self._is_undone = _thread.allocate_lock()
        self._is_undone.acquire()

    def run(self) -> None:
        """Do the work, unless it was cancelled."""
        work, self._work = self._work, None
        if work is None or not self.set_running_or_notify_cancel():
            return
        try:
            result = work()
        except BaseException as exc:  # as an executor does it
            self.set_exception(exc)
        else:
            self.set_result(result)

    def set_result(self, result: Any) -> None:
        """See :class:`concurrent.futures.Future`."""
        super().set_result(result)
        self._is_undone.release()

    def set_exception(self, exception: BaseException | None) -> None:
        """See :class:`concurrent.futures.Future`."""
        super().set_exception(exception)
        self._is_undone.release()

    def cancel(self) -> bool:
        """See :class:`concurrent.futures.Future`."""
        was_cancelled, is_cancelled = self.cancelled(), super().cancel()
        if is_cancelled and not was_cancelled:
            self._is_undone.release()
        return is_cancelled

    def result(self, timeout: float | None = None) -> Any:
        """See :class:`concurrent.futures.Future`."""
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See :class:`concurrent.futures.Future`."""
        self._wait(timeout)
        return super().exception(0)

    def _wait(self, timeout: float | None) -> None:
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            if self._is_undone.acquire(timeout=min(left, _LOOK_SECONDS)):
                self._is_undone.release()
                return


class BrokenOff(ShardUnavailable):
    """The caller has gone: its arrays are its own again. Nobody but the threads that work for it sees this."""


class Leave:
    """Leave to write into a caller's arrays, which ends when the caller is broken off. Thread-safe.

    ``with leave:`` writes, and raises BrokenOff if it has ended; writers come one after another.
    """

    def __init__(self) -> None:
        self._writing = threading.Lock()
        self._has_ended = False
        self._break_off: list[Callable[[], object]] = []

    def __enter__(self) -> None:
        self._writing.acquire()
        if self._has_ended:
            self._writing.release()
            raise BrokenOff("the caller has gone")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._break_off.clear()
        self._writing.release()

    def on_end(self, break_off: Callable[[], object]) -> None:
        """Say, inside the ``with`` block, what ends a write that may take long."""
        self._break_off.append(break_off)
        if self._has_ended:
            break_off()

    def end(self) -> None:
        """End it; returns when nobody writes any more."""
        self._has_ended = True
        for break_off in tuple(self._break_off):
            break_off()
        with self._writing:
            pass


def held(leave: Leave | None) -> AbstractContextManager[None]:
    """``leave``, or what stands for it where nothing takes it away."""
    return nullcontext() if leave is None else leave
