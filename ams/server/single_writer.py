"""Single writer of a shard: one call at a time, each run to completion, in order of arrival.

The thread that has the shard's turn is its writer. Calls queue for it, and are done by the writer's own thread; a call
that finds no other may run on the thread that brought it (:meth:`SingleWriter.run`), which saves two changes of thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import partial

from geartrain.ams.kernels._core import Alarm, Place, Turn
from geartrain.ams.values.errors import GeartrainError, InternalError, OutOfMemory, ShardUnavailable
from geartrain.ams.values.shard_messages import CallContext, Reply, Request

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class QueuedRequest:
    """Request with its caller and the future of its reply."""

    context: CallContext
    request: Request
    future: Future[Reply]


class SingleWriter:
    """Queue of calls to ``perform``, each in its ``turn``; an error becomes the call's reply. Thread-safe.

    Between calls the writer's own thread watches deadlines: it calls ``expire`` when the earliest one, returned by
    ``next_deadline`` (None: there is none), has passed on ``clock``. Both are called with the turn. ``refusal`` makes
    the error of calls after :meth:`close`. ``on_end`` is called, on that thread, if it ends early: calls that wait for
    a deadline would wait for ever.
    """

    def __init__(
        self,
        name: str,
        perform: Callable[[QueuedRequest], None],
        *,
        turn: Turn,
        alarm: Alarm,
        next_deadline: Callable[[], float | None],
        expire: Callable[[], None],
        refusal: Callable[[], GeartrainError],
        clock: Callable[[], float],
        on_end: Callable[[GeartrainError], None],
    ) -> None:
        self.turn = turn
        """Turn of the thread at work: its holder owns what ``perform`` changes."""
        self._name = name
        self._perform = perform
        self._next_deadline = next_deadline
        self._expire = expire
        self._refusal = refusal
        self._clock = clock
        self._on_end = on_end
        self._alarm = alarm
        """Time at which the own thread looks at the deadlines next, on the clock."""
        self._calls: queue.SimpleQueue[tuple[QueuedRequest, Place] | None] = queue.SimpleQueue()
        """Calls with their places in the queue for the turn, in order. None: check deadlines and ``_closed`` again."""
        self._closed = False
        self._gate = threading.Lock()
        """Lock of ``_closed`` and the order of ``_calls``."""
        alarm.on_ring(partial(self._calls.put, None))
        self._thread = threading.Thread(target=self._serve, name=name.replace(" ", "-"), daemon=True)
        self._thread.start()

    def submit(self, context: CallContext, request: Request) -> Future[Reply]:
        """Queue a request; the future holds its reply or a GeartrainError. Never blocks."""
        call = QueuedRequest(context, request, Future())
        with self._gate:
            if self._closed:
                call.future.set_exception(self._refusal())
            else:
                self._calls.put((call, self.turn.enter()))
        return call.future

    def run(self, context: CallContext, request: Request) -> Future[Reply]:
        """Do :meth:`submit` on this thread, before it returns, if nothing else is waiting or at work.

        On the main thread it is :meth:`submit`: Python interrupts that one anywhere, also between a change and its
        mark.
        """
        if threading.current_thread() is threading.main_thread():
            return self.submit(context, request)
        with self._gate:
            alone = not self._closed and self.turn.try_acquire()
        if not alone:
            return self.submit(context, request)
        call = QueuedRequest(context, request, Future())
        try:
            self._answer(call)
            is_earlier = self._update_deadline()
        finally:
            self.turn.release()
        if is_earlier:
            self._calls.put(None)
        return call.future

    def close(self) -> None:
        """Finish queued calls, refuse later ones, stop the thread. Idempotent."""
        with self._gate:
            self._closed = True
        self._calls.put(None)
        self._thread.join()

    def _answer(self, call: QueuedRequest) -> None:
        # A cancelled call leaves no trace. A write that has begun goes on without its caller.
        if not call.future.set_running_or_notify_cancel():
            return
        try:
            self._perform(call)
        except BaseException as error:  # SystemExit, too: the next caller needs this thread
            if not call.future.done():
                call.future.set_exception(to_geartrain_error(error, self._name))

    def _update_deadline(self) -> bool:
        """Return whether the own thread must look earlier than planned."""
        return self._alarm.note(self._next_deadline())

    def _serve(self) -> None:
        try:
            self._serve_calls()
        except BaseException as error:
            logger.critical("the writer of %s has ended", self._name, exc_info=error)
            self._refuse_calls(InternalError(f"the writer of {self._name} has ended: {error!r}; its log says where"))

    def _refuse_calls(self, error: GeartrainError) -> None:
        """Refuse all calls from now on, queued ones, too."""
        self._refusal = lambda: error
        with self._gate:
            self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                if (entry := self._calls.get_nowait()) is not None:
                    entry[1].leave()
                    if entry[0].future.set_running_or_notify_cancel():
                        entry[0].future.set_exception(error)
        self._on_end(error)

    def _serve_calls(self) -> None:
        while (entry := self._next_entry()) is not None:
            call, place = entry
            place.wait()
            try:
                # Before the call, or a busy shard would never handle deadlines.
                if self._alarm.at <= self._clock():
                    self._deadline_loop()
                if call is not None:
                    self._answer(call)
                    self._update_deadline()
            finally:
                place.leave()
            del entry, call, place  # or the rows of a request stay in memory until the next one arrives

    def _deadline_loop(self) -> None:
        try:
            self._expire()
            deadline = self._next_deadline()
        except BaseException:  # the other deadlines must still be handled
            logger.exception("%s failed at a deadline; retrying in %g s", self._name, _RETRY_SECONDS)
            deadline = self._clock() + _RETRY_SECONDS
        self._alarm.at = math.inf if deadline is None else deadline

    def _next_entry(self) -> tuple[QueuedRequest | None, Place] | None:
        """Return the next call in the queue; a place without a call, if a deadline passes first; None: closed, empty.

        This thread waits for no other place while calls are queued: the turn may be that of one of them already.
        """
        while True:
            left = max(0.0, self._alarm.at - self._clock())
            try:
                entry = self._calls.get(timeout=None if left == math.inf else left)
            except queue.Empty:
                with self._gate:
                    if self._calls.empty():
                        return None, self.turn.enter()
                continue
            if entry is not None:
                return entry
            with self._gate:
                if self._closed and self._calls.empty():
                    return None


def to_geartrain_error(error: BaseException, name: str) -> GeartrainError:
    """Return the error that a caller of ``name`` gets; a defect becomes an InternalError, and the shard goes on."""
    if isinstance(error, GeartrainError):
        return _without_frames(error)
    if isinstance(error, MemoryError):
        return OutOfMemory(f"{name} is out of memory; the call changed nothing. Give its machine more memory")
    return InternalError(f"{name}: {error!r}\n{''.join(traceback.format_exception(error))}")


def pass_on(work: Future[Reply], future: Future[Reply]) -> None:
    """Complete ``future`` as ``work`` ends."""

    def ended(work: Future[Reply]) -> None:
        with contextlib.suppress(InvalidStateError):  # the caller gave up waiting
            error = None if work.cancelled() else work.exception()
            if work.cancelled():
                future.set_exception(ShardUnavailable("the shard was shut down meanwhile"))
            elif error is None:
                future.set_result(work.result())
            else:
                future.set_exception(error if isinstance(error, GeartrainError) else InternalError(repr(error)))

    work.add_done_callback(ended)


def _without_frames(error: GeartrainError) -> GeartrainError:
    """Return the error without tracebacks: they hold the request and its table, which would outlive a drop until the
    garbage collector finds the cycle of error, call and future.
    """
    cause: BaseException | None = error
    while cause is not None:
        cause.__traceback__ = None
        cause = cause.__cause__ or cause.__context__
    return error
