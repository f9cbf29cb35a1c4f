"""Request batching: requests of equal version, operation and parameters form one batch.

An idle service answers a request at once. While others are being answered, new requests are joined: a batch starts when
it is full, when its first request has waited for ``max_wait_seconds``, or when nothing else is in progress.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from geartrain.ams.values.errors import Busy, GeartrainError, InternalError
from geartrain.ams.values.text import counted
from geartrain.serving.answers import Arrays, Question, concatenated, reading
from geartrain.serving.catalog import Lease

logger = logging.getLogger(__name__)


class AnsweredBatch(NamedTuple):
    """An answered batch, for counters."""

    lease: Lease
    """Lease of the first question."""
    operation: str
    questions: int
    items: int
    waited_seconds: float
    """Wait of the first question, which waited longest."""
    ran_seconds: float


@dataclass(eq=False, slots=True)
class _Asked:
    lease: Lease
    operation: str
    at: float
    answer: Future[Arrays] = field(default_factory=Future)
    question: Question = field(init=False)
    """Set once the question is read."""
    items: int = 1


@dataclass(eq=False, slots=True)
class _Group:
    """Questions that may share a batch."""

    asked: deque[_Asked] = field(default_factory=deque)
    items: int = 0


class Batcher:
    """Joins questions into batches and answers them on threads of its own. Thread-safe."""

    def __init__(
        self,
        *,
        max_batch: int = 64,
        max_wait_seconds: float = 0.002,
        max_queued: int = 1024,
        threads: int = 1,
        clock: Callable[[], float] = time.monotonic,
        on_batch: Callable[[AnsweredBatch], None] = lambda _: None,
    ) -> None:
        """Start the threads.

        Args:
            max_batch: most items of a batch; a larger question is a batch of its own.
            max_wait_seconds: longest wait of a question for others, once a thread is free.
            max_queued: most items in the queue; further questions raise Busy. An empty queue takes any question.
            threads: batches at once. 0: the owner calls :meth:`answer_next`, as tests do.
            clock: monotonic, in seconds.
            on_batch: called with each answered batch, on its thread.
        """
        self._max_batch, self._max_wait, self._max_queued = max_batch, max_wait_seconds, max_queued
        self._clock, self._on_batch = clock, on_batch
        self._changed = threading.Condition()
        self._waiting: dict[Hashable, _Group] = {}
        self._unread: deque[tuple[_Asked, Callable[[], Question]]] = deque()
        self.queued = 0
        """Number of items in the queue."""
        self._under_way = 0
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._answer_batches, name=f"answers-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, lease: Lease, operation: str, question: Question | Callable[[], Question]) -> Future[Arrays]:
        """Queue a question to an operation of the leased version; the result has arrays with a row for each item.

        A callable is run by the answering thread to read the question, which saves a thread switch where it is quick;
        it counts as one item until then. The version is held until the answer, even if the client leaves: a cancel has
        an effect only before its batch starts. The future gets errors of reading and of the operation. Raises Busy if
        the queue is full or the service is ending.
        """
        items = question.num_items if isinstance(question, Question) else 1
        with self._changed:
            if self._is_closed:
                raise Busy("the service is ending; ask again in a second")
            if self.queued and self.queued + items > self._max_queued:
                waits = counted(self.queued, "item")
                raise Busy(f"{waits} wait already, of {self._max_queued:,} that may; ask again in a second")
            asked = _Asked(lease.again(), operation, self._clock())
            if isinstance(question, Question):
                self._append(asked, question)
            else:
                self._unread.append((asked, question))
                self.queued += 1
            self._changed.notify()
        asked.answer.add_done_callback(asked.lease.release)
        return asked.answer

    def answer_next(self) -> bool:
        """Answer the next batch that need not wait, on this thread; return whether there was one."""
        self._read()
        with self._changed:
            batch, _ = self._next(self._clock())
        if not batch:
            return False
        self._answer(batch)
        return True

    def close(self) -> None:
        """Answer all queued questions, then stop. New questions are refused."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        while self._unread or self.answer_next():
            self._read()

    def _answer_batches(self) -> None:
        while True:
            if self._unread:
                self._read()
            with self._changed:
                batch, due_seconds = self._next(self._clock())
                if not batch and not self._unread:
                    if self._is_closed and not self._waiting:
                        return
                    self._changed.wait(due_seconds)
            if batch:
                self._answer(batch)

    def _append(self, asked: _Asked, question: Question) -> None:
        asked.question, asked.items = question, question.num_items
        shapes = tuple([(name, array.dtype.str, array.shape[1:]) for name, array in question.arrays.items()])
        key = (id(asked.lease.servable), asked.operation, question.parameters, shapes)
        group = self._waiting.setdefault(key, _Group())
        group.asked.append(asked)
        group.items += asked.items
        self.queued += asked.items

    def _read(self) -> None:
        """Read unread questions, at most one batch, so that others are answered in between."""
        with self._changed:
            unread: list[tuple[_Asked, Callable[[], Question]]] = []
            while self._unread and len(unread) < self._max_batch:
                unread.append(self._unread.popleft())
        read = []
        reading.fast_only = True
        for asked, question in unread:
            try:
                if not asked.answer.cancelled():
                    read.append((asked, question()))
            except Exception as exc:
                if asked.answer.set_running_or_notify_cancel():
                    asked.answer.set_exception(exc)
        reading.fast_only = False
        with self._changed:
            self.queued -= len(unread)
            for asked, found in read:
                self._append(asked, found)

    def _next(self, now: float) -> tuple[list[_Asked], float | None]:
        """Dequeue the questions of the batch that starts now, oldest first.

        If no batch starts, return the seconds until a question has waited enough; None: the queue is empty. Drops
        questions whose clients have left.
        """
        batch: list[_Asked] = []
        is_free = self._is_closed or not self._under_way
        while not batch:
            chosen, since, first = None, float("inf"), float("inf")
            for key, group in self._waiting.items():
                at = group.asked[0].at
                first = min(first, at)
                if at < since and (is_free or now >= at + self._max_wait or group.items >= self._max_batch):
                    chosen, since = key, at
            if chosen is None:
                return [], max(0.0, first + self._max_wait - now) if self._waiting else None
            group, items = self._waiting[chosen], 0
            while group.asked and (not batch or items + group.asked[0].items <= self._max_batch):
                asked = group.asked.popleft()
                group.items -= asked.items
                self.queued -= asked.items
                if asked.answer.set_running_or_notify_cancel():
                    batch.append(asked)
                    items += asked.items
            if not group.asked:
                del self._waiting[chosen]
        self._under_way += 1
        return batch, None

    def _answer(self, batch: Sequence[_Asked]) -> None:
        first, began = batch[0], self._clock()
        try:
            self._run(batch)
            items, ran = sum(map(attrgetter("items"), batch)), self._clock() - began
            self._on_batch(AnsweredBatch(first.lease, first.operation, len(batch), items, began - first.at, ran))
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def _run(self, batch: Sequence[_Asked]) -> None:
        operation = batch[0].lease.servable.operations[batch[0].operation]
        try:
            joined = concatenated([asked.question for asked in batch]) if len(batch) > 1 else batch[0].question
            answered = operation.run(joined)
            items = sum(map(attrgetter("items"), batch))
            for name, array in answered.items():
                if len(array) != items:
                    raise InternalError(f"{operation.name} answered {items} items with {len(array)} {name}")
        except Exception as exc:
            if len(batch) > 1:  # an error in one must not reach the others: halve until it is alone
                self._run(batch[: len(batch) // 2])
                self._run(batch[len(batch) // 2 :])
                return
            if not isinstance(exc, GeartrainError):
                logger.exception("%s failed", operation.name)
            batch[0].answer.set_exception(exc)
            return
        at = 0
        for asked in batch:
            end = at + asked.items
            asked.answer.set_result({name: array[at:end] for name, array in answered.items()})
            at = end
