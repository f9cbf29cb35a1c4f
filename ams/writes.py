"""Writes that are applied once: their numbers, and one write on its way to its shards."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence

from geartrain.ams import failpoints
from geartrain.ams.messages import CallContext, Done, Reply, Request


class WriteStream:
    """Numbers the writes of one client. Thread-safe.

    At most ``window`` numbers are open at once: the shards remember replies only that far.
    """

    def __init__(self, window: int, name: str | None = None) -> None:
        self.name = name or uuid.uuid4().hex
        self.incarnation = time.time_ns()
        self._window = window
        self._next = 1
        self._open: set[int] = set()
        self._changed = threading.Condition()

    def begin(self) -> int:
        """Return the next number; blocks while the oldest open write is a whole window behind."""
        with self._changed:
            self._changed.wait_for(lambda: self._next - self._oldest() < self._window)
            sequence = self._next
            self._next += 1
            self._open.add(sequence)
            return sequence

    def end(self, sequence: int) -> None:
        """The write is acknowledged, or given up: it will not be sent again."""
        with self._changed:
            self._open.discard(sequence)
            self._changed.notify_all()

    def context(self, sequence: int) -> CallContext:
        """Return what travels with the write."""
        with self._changed:
            return CallContext(
                stream=self.name,
                incarnation=self.incarnation,
                sequence=sequence,
                oldest_unacknowledged=self._oldest(),
            )

    def _oldest(self) -> int:
        return min(self._open, default=self._next)


Deliver = Callable[[Sequence[tuple[int, Request]], CallContext], list[Reply | BaseException]]


class Write:
    """One write, prepared: it has its number and its requests. :meth:`send` may be called again after an error.

    A repeated send reaches only the shards that have not answered, under the same number, so that no shard applies
    the write twice. Not thread-safe.
    """

    def __init__(self, stream: WriteStream, requests: Sequence[tuple[int, Request]], deliver: Deliver) -> None:
        self._stream = stream
        self._pending = list(requests)
        self._deliver = deliver
        self._created = 0
        self._duplicate = False
        self._sequence = stream.begin()

    def send(self) -> Done:
        """Send to every shard that has not answered yet; return the joint reply.

        Raises the first GeartrainError of a shard; the shards that answered keep the write, the others may be tried
        again with the same write.
        """
        failpoints.reach("client.send.before")
        outcomes = self._deliver(self._pending, self._stream.context(self._sequence)) if self._pending else []
        failed, first_error = [], None
        for call, outcome in zip(self._pending, outcomes, strict=True):
            if isinstance(outcome, Done):
                self._created += outcome.created
                self._duplicate |= outcome.duplicate
            elif isinstance(outcome, BaseException):
                failed.append(call)
                first_error = first_error or outcome
        self._pending = failed
        if first_error is not None:
            raise first_error
        failpoints.reach("client.reply.after")
        self._stream.end(self._sequence)
        return Done(created=self._created, duplicate=self._duplicate)

    def abandon(self) -> None:
        """Give the write up. On shards that have not answered it is unknown whether it was applied."""
        self._pending = []
        self._stream.end(self._sequence)
