"""Items of an iterator through functions, each on threads of its own, in order, with bounded queues between them."""

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
"""A Ctrl-C that comes just before the main thread goes to sleep does not wake it: it looks by itself."""
_STOPPED = object()
_END = object()
_this_thread = threading.local()


class Stage(NamedTuple):
    """A function item -> item, and how many threads call it."""

    work: Callable[[Any], Any]
    num_threads: int = 1


@dataclass
class StageTime:
    """What one stage has taken so far."""

    items: int = 0
    seconds: float = 0.0
    """Without the time that it waited for others."""
    cpu_seconds: float = 0.0
    """Of its threads."""

    def count(self, begun: tuple[float, float]) -> None:
        """One more item, begun at such a :func:`now`."""
        seconds, cpu_seconds = now()
        self.items += 1
        self.seconds += seconds - begun[0]
        self.cpu_seconds += cpu_seconds - begun[1]


def now() -> tuple[float, float]:
    """Seconds of the clock, and of this thread's CPU."""
    return time.perf_counter(), time.thread_time()


class Pipeline:
    """The threads. They end with the items, with an error, or when they are told to stop.

    They know nothing of who takes the items, who can thus be forgotten while they run.
    """

    def __init__(self, names: Sequence[str], depth: int, stages: Sequence[Stage]) -> None:
        """``stages`` are those after the reader. ``names``: of all, the reader's first. ``depth``: items that a stage
        may be ahead of the next; each thread but its first is at one more.
        """
        self._stages = stages
        self._queues = [_Queue(depth), *(_Queue(depth + stage.num_threads - 1) for stage in stages)]
        self._names = names
        self._threads: list[threading.Thread] = []
        self._interrupt: Callable[[], None] = lambda: None
        self._read = _Read()
        self._num_taken = 0

    def start(self, first: Any, items: Iterator[Any], times: Sequence[StageTime]) -> None:
        """Begin with the item ``first``, already read. The iterator is the reader's from now on, which closes it."""
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
        # A daemon: the process can end while a loader waits for data. Whoever takes the items stops them before.
        thread = threading.Thread(target=target, name=f"geartrain-{name}", daemon=True)
        self._threads.append(thread)
        uninterrupted(thread.start)

    @property
    def has_started(self) -> bool:
        """Whether the iterator is a thread's by now."""
        return any(thread.ident is not None for thread in self._threads)

    def next(self) -> Any:
        """The next item. Raises what a stage has raised, once the items before have been taken; StopIteration."""
        item = self._queues[-1].get()
        if item is _END or item is _STOPPED:
            raise StopIteration
        if isinstance(item, _Failure):
            error = item.error
            try:
                if isinstance(error, StopIteration):  # would end the caller's loop as if there were no more items
                    raise RuntimeError("a stage has raised StopIteration") from error
                raise error
            finally:
                del error, item  # or the error would hold itself, by way of this frame
        self._num_taken += 1
        return item

    def stop(self, timeout_seconds: float | None = None) -> None:
        """Drop what was not taken, and wait until the threads have ended what they are at. Idempotent.

        The garbage collector may call it from anywhere, also where a lock is held that a thread needs: so it has a
        ``timeout_seconds`` for each thread, and none is waited for on another of such threads.
        """
        for one in self._queues:
            one.stop()
        self._interrupt()  # of an iterator that may wait for long, and says how that is ended
        for thread in self._threads:
            if thread.ident is not None and not is_stage():
                thread.join(timeout_seconds)
        self._read.stop(self._num_taken)


def mark_as_stage() -> None:
    """This thread is one of a pipeline."""
    _this_thread.is_stage = True


def is_stage() -> bool:
    """Whether this thread is one of a pipeline."""
    return getattr(_this_thread, "is_stage", False)


class _Read:
    """What became of the items that were read: an iterator that can is given back those that nobody has taken."""

    def __init__(self) -> None:
        self.count = 1
        """With the first, which was read before."""
        self.give_back: Callable[[int], None] = lambda _: None
        self._num_taken: int | None = None
        """None: they are taken still."""
        self._is_ended = False
        self._todo: list[None] = [None]
        """Empty once it was done: by whoever comes last, the reader or who stops it."""

    def stop(self, num_taken: int) -> None:
        """Nobody takes any more."""
        if self._num_taken is None:
            self._num_taken = num_taken
        self._check()

    def stop_reading(self) -> None:
        """Nobody reads any more."""
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
    """Room for so many items between stages.

    Of SimpleQueues, for those have no lock that Ctrl-C could leave taken.
    """

    def __init__(self, depth: int) -> None:
        self._places: queue.SimpleQueue[queue.SimpleQueue[Any]] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_stopped = False
        for _ in range(depth):
            self._room.put(None)

    def reserve(self) -> bool:
        """Wait for room for one more. False: stopped."""
        self._room.get()
        if self._is_stopped:
            self._room.put(None)  # for the others that wait
        return not self._is_stopped

    def place(self) -> queue.SimpleQueue[Any]:
        """The next place in the room that was reserved: whoever took it puts its item there, always."""
        made: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._places.put(made)
        return made

    def get(self) -> Any:
        """The item of the oldest place, once it is there."""
        place = _taken(self._places)
        item = _STOPPED if self._is_stopped else _taken(place)
        if self._is_stopped:
            self.place()  # for who asks again
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
            except BaseException as exc:  # raised where the items are taken
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
    """End an iterator that has an end, as generators do."""
    end = getattr(items, "close", None)
    if not callable(end):
        return
    try:
        end()
    except Exception:
        logger.exception("closing %r failed", items)


class _Workers:
    """The threads of one stage: they take items in order, and hand them on in that order, whichever is done first."""

    def __init__(self, work: Callable[[Any], Any], source: _Queue, to: _Queue, times: StageTime) -> None:
        self._work, self._source, self._to, self._times = work, source, to, times
        self._turn = threading.Lock()  # the caller's thread, which Ctrl-C may interrupt, never takes it
        self._counting = threading.Lock()
        self._is_over = False

    def run(self) -> None:
        """Work until there is no more, or until an error."""
        mark_as_stage()
        while (taken := self._next_item()) is not None:
            item, place = taken
            begun = now()
            try:
                item = self._work(item)
            except BaseException as exc:  # raised where the items are taken
                self._is_over = True
                item = _Failure(exc)
            else:
                with self._counting:
                    self._times.count(begun)
            place.put(item)
            del taken, item, place

    def _next_item(self) -> tuple[Any, queue.SimpleQueue[Any]] | None:
        """The next item and the place for what it becomes; None: there is no more."""
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
