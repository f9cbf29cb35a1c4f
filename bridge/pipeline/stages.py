"""Items of an iterator through functions, each on a thread of its own, in order, with bounded queues between them."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from geartrain.ams.values.interrupts import shielded

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.1
"""A Ctrl-C that comes just before the main thread goes to sleep does not wake it: it looks by itself."""
_STOPPED = object()
_END = object()
_this_thread = threading.local()


@dataclass
class StageTime:
    """What one stage has taken so far."""

    items: int = 0
    seconds: float = 0.0
    """Without the time that it waited for others."""
    cpu_seconds: float = 0.0
    """Of its thread."""

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

    def __init__(self, names: Sequence[str], depth: int) -> None:
        """``names`` of the stages, that of the reader first; ``depth``: items that a stage may be ahead of the next."""
        self._queues = [_Queue(depth) for _ in names]
        self._names = names
        self._threads: list[threading.Thread] = []
        self._interrupt: Callable[[], None] = lambda: None
        self._read = _Read()
        self._num_taken = 0

    def start(
        self, first: Any, items: Iterator[Any], works: Sequence[Callable[[Any], Any]], times: Sequence[StageTime]
    ) -> None:
        """Begin with the item ``first``, already read. The iterator is the first thread's from now on, which closes it.

        ``works`` are those of the stages after the reader.
        """
        self._queues[0].reserve()
        self._queues[0].put(first)
        self._interrupt = getattr(items, "interrupt", self._interrupt)
        self._read.give_back = getattr(items, "give_back", self._read.give_back)
        steps = [(_read, (items, self._queues[0], times[0], self._read))]
        for number, work in enumerate(works):
            steps.append((_work, (work, self._queues[number], self._queues[number + 1], times[number + 1])))  # type: ignore[arg-type]
        for (target, arguments), name in zip(steps, self._names, strict=True):
            # A daemon: the process can end while a loader waits for data. Whoever takes the items stops them before.
            thread = threading.Thread(target=target, args=arguments, name=f"geartrain-{name}", daemon=True)
            self._threads.append(thread)
            shielded(thread.start)

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
        self._look()

    def end(self) -> None:
        """Nobody reads any more."""
        self._is_ended = True
        self._look()

    def _look(self) -> None:
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
    """Room for so many items between two threads.

    Of two SimpleQueues, for those have no lock that Ctrl-C could leave taken.
    """

    def __init__(self, depth: int) -> None:
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_stopped = False
        for _ in range(depth):
            self._room.put(None)

    def reserve(self) -> bool:
        """Wait for room for one more. False: stopped."""
        self._room.get()
        return not self._is_stopped

    def put(self, item: Any) -> None:
        """Fill the room that was reserved."""
        self._items.put(item)

    def get(self) -> Any:
        while True:
            try:
                item = self._items.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                continue
            if self._is_stopped:
                self._items.put(_STOPPED)  # for who asks again
                return _STOPPED
            self._room.put(None)
            return item

    def stop(self) -> None:
        self._is_stopped = True
        self._room.put(None)
        self._items.put(_STOPPED)


def _read(items: Iterator[Any], to: _Queue, taken: StageTime, read: _Read) -> None:
    mark_as_stage()
    try:
        while to.reserve():
            begun = now()
            try:
                item = next(items)
            except StopIteration:
                to.put(_END)
                return
            except BaseException as exc:  # raised where the items are taken
                to.put(_Failure(exc))
                return
            taken.count(begun)
            read.count += 1
            to.put(item)
            del item
    finally:
        try:
            read.end()
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


def _work(work: Callable[[Any], Any], source: _Queue, to: _Queue, taken: StageTime) -> None:
    mark_as_stage()
    while to.reserve():
        item = source.get()
        if item is _STOPPED:
            return
        if item is _END or isinstance(item, _Failure):
            to.put(item)
            return
        begun = now()
        try:
            item = work(item)
        except BaseException as exc:
            to.put(_Failure(exc))
            return
        taken.count(begun)
        to.put(item)
        del item
