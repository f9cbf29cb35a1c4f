"""Marks of applied writes: what makes a retried write apply once (RIFL, section 3).

The key is (stream, sequence), not the process. A mark is dropped when the client says that it has the reply.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from geartrain.ams.errors import InvalidArgument, StaleClient
from geartrain.ams.messages import CallContext, Done, Reply

WINDOW = 1024
"""A client may be at most this many writes ahead of its oldest unacknowledged one."""


@dataclass
class _Stream:
    incarnation: int = 0
    oldest_unacknowledged: int = 0
    done: dict[int, Done] = field(default_factory=dict)
    tables: dict[int, str] = field(default_factory=dict)
    """Table of each write that was admitted and did not fail."""
    waiting: dict[int, list[Future[Reply]]] = field(default_factory=dict)


class MarkedWrite(NamedTuple):
    """A write that was applied."""

    sequence: int
    created: int
    table: str


class MarkedStream(NamedTuple):
    """What a shard knows of a stream, as snapshots keep it."""

    incarnation: int
    oldest_unacknowledged: int
    done: list[MarkedWrite]


class WriteMarks:
    """The marks of one shard. Used by the shard's own thread only; memory is bounded by streams × window."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}

    def admit(self, context: CallContext, future: Future[Reply]) -> bool:
        """Say whether the write is new.

        A duplicate of an applied write gets its reply here; a duplicate of one in flight joins it.
        Raises StaleClient if the caller was superseded, InvalidArgument if the write has no name.
        """
        if not context.stream or context.sequence < 1:
            raise InvalidArgument(
                f"a write needs a stream and a sequence >= 1 (stream {context.stream!r}, sequence {context.sequence}): "
                "they are what makes a retry apply once"
            )
        stream = self._fence(context)
        self._forget_acknowledged(stream, context.oldest_unacknowledged)
        if context.sequence < stream.oldest_unacknowledged:
            raise StaleClient(
                f"sequence {context.sequence} of stream {context.stream!r} was acknowledged already "
                f"(oldest unacknowledged: {stream.oldest_unacknowledged}); number writes upwards"
            )
        if context.sequence in stream.done:
            done = stream.done[context.sequence]
            future.set_result(Done(created=done.created, duplicate=True))
            return False
        if context.sequence in stream.waiting:
            stream.waiting[context.sequence].append(future)
            return False
        if context.sequence >= max(stream.oldest_unacknowledged, 1) + WINDOW:
            raise InvalidArgument(
                f"sequence {context.sequence} of stream {context.stream!r} is more than {WINDOW} ahead of the oldest "
                f"unacknowledged write ({stream.oldest_unacknowledged}); acknowledge writes as replies arrive"
            )
        stream.waiting[context.sequence] = [future]
        return True

    def goes_to(self, context: CallContext, table: str) -> None:
        """Note the table of a write that was admitted: a snapshot of other tables does not hold it."""
        self._streams[context.stream].tables[context.sequence] = table

    def applied(self, context: CallContext, done: Done) -> None:
        """Mark the write and answer everyone who waits for it."""
        stream = self._streams[context.stream]
        stream.done[context.sequence] = done
        for future in stream.waiting.pop(context.sequence, ()):
            future.set_result(done)

    def failed(self, context: CallContext, error: BaseException) -> None:
        """Answer everyone who waits with ``error``; the write left no trace and may be sent again."""
        stream = self._streams[context.stream]
        stream.tables.pop(context.sequence, None)
        for future in stream.waiting.pop(context.sequence, ()):
            future.set_exception(error)

    def streams(self, tables: Collection[str]) -> dict[str, MarkedStream]:
        """Return what is known of each stream, of the writes applied those to ``tables``."""
        return {
            name: MarkedStream(
                stream.incarnation,
                stream.oldest_unacknowledged,
                [
                    MarkedWrite(sequence, done.created, stream.tables[sequence])
                    for sequence, done in stream.done.items()
                    if stream.tables[sequence] in tables
                ],
            )
            for name, stream in self._streams.items()
        }

    def restore(self, name: str, marked: MarkedStream) -> None:
        """Add what :meth:`streams` gave to what is known of a stream: the higher incarnation holds."""
        stream = self._streams.setdefault(name, _Stream())
        stream.incarnation = max(stream.incarnation, marked.incarnation)
        self._forget_acknowledged(stream, marked.oldest_unacknowledged)
        for write in marked.done:
            if write.sequence >= stream.oldest_unacknowledged and write.sequence not in stream.done:
                stream.done[write.sequence] = Done(created=write.created)
                stream.tables[write.sequence] = write.table

    def _fence(self, context: CallContext) -> _Stream:
        stream = self._streams.setdefault(context.stream, _Stream())
        if context.incarnation < stream.incarnation:
            raise StaleClient(
                f"incarnation {context.incarnation} of stream {context.stream!r} was superseded by "
                f"{stream.incarnation}: another process writes in its place; stop this one"
            )
        stream.incarnation = context.incarnation
        return stream

    @staticmethod
    def _forget_acknowledged(stream: _Stream, oldest_unacknowledged: int) -> None:
        if oldest_unacknowledged <= stream.oldest_unacknowledged:
            return
        stream.oldest_unacknowledged = oldest_unacknowledged
        for sequence in [s for s in stream.done if s < oldest_unacknowledged]:
            del stream.done[sequence]
            stream.tables.pop(sequence, None)
