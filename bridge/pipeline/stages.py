"""Pipeline of functions over an iterator's items, each on its own threads, in order, with bounded queues between."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from geartrain.ams.values.interrupts import uninterrupted

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
"""Seconds between wake-ups of the main thread, as Ctrl-C just before a wait does not end it."""
_STOPPED = object()
_END = object()
_this_thread = threading.local()


class Stage(NamedTuple):
    """Function item -> item, and its number of threads."""

    work: Callable[[Any], Any]
    num_threads: int = 1


@dataclass
class StageTime:
    """Accumulated time of one stage."""

    items: int = 0
    seconds: float = 0.0
    """Wall time without waits for other stages."""
    cpu_seconds: float = 0.0
    """CPU time of its threads."""

    def count(self, begun: tuple[float, float]) -> None:
        """Count one item, and the time since ``begun``, a result of :func:`now`."""
        seconds, cpu_seconds = now()
        self.items += 1
        self.seconds += seconds - begun[0]
        self.cpu_seconds += cpu_seconds - begun[1]


def now() -> tuple[float, float]:
    """Return the clock's seconds, and this thread's CPU seconds."""
    return time.perf_counter(), time.thread_time()


class Pipeline:
    """Threads of the stages. They end after the last item, after an error, or by :meth:`stop`.

    They hold no reference to the consumer, which can be garbage-collected while they run.
    """

    def __init__(self, names: Sequence[str], depth: int, stages: Sequence[Stage]) -> None:
        """Prepare the threads; :meth:`start` starts them.

        Args:
            names: Names of all stages, the reader's first.
            depth: Items that a stage may be ahead of the next; each thread but its first adds one.
            stages: Stages after the reader.
        """
        self._stages = stages
        self._queues = [_Queue(depth), *(_Queue(depth + stage.num_threads - 1) for stage in stages)]
        self._names = names
        self._threads: list[threading.Thread] = []
        self._interrupt: Callable[[], None] = lambda: None
        self._read = _Read()
        self._num_taken = 0

    def start(self, first: Any, items: Iterator[Any], times: Sequence[StageTime]) -> None:
        """Start with the item ``first``, already read. The iterator then belongs to the reader, which closes it."""
        self._queues[0].reserve()
        self._queues[0].place().put(first)
        self._interrupt = getattr(items, "interrupt", self._interrupt)
        self._read.give_back = getattr(items, "give_back", self._read.give_back)
        self._run(self._names[0], lambda: _read(items, self._queues[0], times[0], self._read))
        for number, stage in enumerate(self._stages, 1):
            workers = _Workers(stage.work, self._queues[number - 1], self._queues[number], times[number])
            for _ in range(stage.num_threads):
                self._run(self._names[number], workers.run)

    def _run(self, name: str, target: Callable[[], None]) -> None:
        # A daemon thread, so that the process can end while a loader waits for data. Consumers stop it before that.
        thread = threading.Thread(target=target, name=f"geartrain-{name}", daemon=True)
        self._threads.append(thread)
        uninterrupted(thread.start)

    @property
    def has_started(self) -> bool:
        """Whether the iterator belongs to a thread by now."""
        return any(thread.ident is not None for thread in self._threads)

    def next(self) -> Any:
        """Return the next item. Raises a stage's error after the items before it, or StopIteration."""
        item = self._queues[-1].get()
        if item is _END or item is _STOPPED:
            raise StopIteration
        if isinstance(item, _Failure):
            error = item.error
            try:
                if isinstance(error, StopIteration):  # it would end the caller's loop as if there were no more items
                    raise RuntimeError("a stage has raised StopIteration") from error
                raise error
            finally:
                del error, item  # otherwise the error would keep itself alive through this frame
        self._num_taken += 1
        return item

    def stop(self, timeout_seconds: float | None = None) -> None:
        """Drop remaining items, and wait until the threads have finished their current ones. Idempotent.

        Waits up to ``timeout_seconds`` for each thread, since the garbage collector may call it where a lock is held
        that a thread needs. Called on a pipeline's own thread, it does not wait.
        """
        for one in self._queues:
            one.stop()
        self._interrupt()  # the iterator may be waiting for its next item
        for thread in self._threads:
            if thread.ident is not None and not is_stage():
                thread.join(timeout_seconds)
        self._read.stop(self._num_taken)


def mark_as_stage() -> None:
    """Mark this thread as one of a pipeline."""
    _this_thread.is_stage = True


def is_stage() -> bool:
    """Return whether this thread is one of a pipeline."""
    return getattr(_this_thread, "is_stage", False)


class _Read:
    """Count of items read, so that those not consumed can be given back to an iterator with ``give_back``."""

    def __init__(self) -> None:
        self.count = 1
        """Number of items read, with the first one."""
        self.give_back: Callable[[int], None] = lambda _: None
        self._num_taken: int | None = None
        """Number of items consumed; None: not known yet."""
        self._is_ended = False
        self._todo: list[None] = [None]
        """Empty once items were given back: by the reader or the stopping thread, whichever ends last."""

    def stop(self, num_taken: int) -> None:
        """Record that no more items are consumed."""
        if self._num_taken is None:
            self._num_taken = num_taken
        self._check()

    def stop_reading(self) -> None:
        """Record that no more items are read."""
        self._is_ended = True
        self._check()

    def _check(self) -> None:
        if self._num_taken is None or not self._is_ended:
            return
        try:
            self._todo.pop()
        except IndexError:
            return
        if self.count > self._num_taken:
            self.give_back(self.count - self._num_taken)


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Queue:
    """Bounded queue between stages.

    Made of SimpleQueues, which have no lock that Ctrl-C could leave locked.
    """

    def __init__(self, depth: int) -> None:
        self._places: queue.SimpleQueue[queue.SimpleQueue[Any]] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_stopped = False
        for _ in range(depth):
            self._room.put(None)

    def reserve(self) -> bool:
        """Wait for room for one more item; return whether the queue still runs."""
        self._room.get()
        if self._is_stopped:
            self._room.put(None)  # for other waiting threads
        return not self._is_stopped

    def place(self) -> queue.SimpleQueue[Any]:
        """Return the next place, after :meth:`reserve`; the caller must put its item there."""
        made: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._places.put(made)
        return made

    def get(self) -> Any:
        """Wait for the item of the oldest place, and return it."""
        place = _taken(self._places)
        item = _STOPPED if self._is_stopped else _taken(place)
        if self._is_stopped:
            self.place()  # for the next call
            return _STOPPED
        self._room.put(None)
        return item

    def stop(self) -> None:
        self._is_stopped = True
        self._room.put(None)
        self.place()


def _taken(items: queue.SimpleQueue[Any]) -> Any:
    while True:
        try:
            return items.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            continue


def _read(items: Iterator[Any], to: _Queue, taken: StageTime, read: _Read) -> None:
    mark_as_stage()
    try:
        while to.reserve():
            begun = now()
            try:
                item = next(items)
            except StopIteration:
                to.place().put(_END)
                return
            except BaseException as exc:  # raised to the consumer
                to.place().put(_Failure(exc))
                return
            taken.count(begun)
            read.count += 1
            to.place().put(item)
            del item
    finally:
        try:
            read.stop_reading()
        finally:
            close(items)


def close(items: Any) -> None:
    """Close an iterator that can be closed, such as a generator."""
    end = getattr(items, "close", None)
    if not callable(end):
        return
    try:
        end()
    except Exception:
        logger.exception("closing %r failed", items)


class _Workers:
    """Threads of one stage: they pass items on in the order of arrival, whichever is finished first."""

    def __init__(self, work: Callable[[Any], Any], source: _Queue, to: _Queue, times: StageTime) -> None:
        self._work, self._source, self._to, self._times = work, source, to, times
        self._turn = threading.Lock()  # never locked by the caller's thread, which Ctrl-C may interrupt
        self._counting = threading.Lock()
        self._is_over = False

    def run(self) -> None:
        """Work until there are no more items, or until an error."""
        mark_as_stage()
        while (taken := self._next_item()) is not None:
            item, place = taken
            begun = now()
            try:
                item = self._work(item)
            except BaseException as exc:  # raised to the consumer
                self._is_over = True
                item = _Failure(exc)
            else:
                with self._counting:
                    self._times.count(begun)
            place.put(item)
            del taken, item, place

    def _next_item(self) -> tuple[Any, queue.SimpleQueue[Any]] | None:
        """Return the next item and the place for its result; None: there are no more."""
        with self._turn:
            if self._is_over or not self._to.reserve():
                return None
            item = self._source.get()
            if item is _STOPPED or self._is_over:
                return None
            place = self._to.place()
            if item is not _END and not isinstance(item, _Failure):
                return item, place
            self._is_over = True
            place.put(item)
            return None
