"""Writes that a shard has completed: by them it recognises one that comes again, and applies it once (RIFL, section 3).

The key is (stream, sequence), not the process. A completed write is forgotten when the client says that it has the
reply, and when a fence says that the job starts over. Two processes that write as one stream are told apart here, too:
the one with the lower incarnation was superseded, and is refused (StaleClient). Snapshots hold what is known here as
*marks*: ``freeze/marks.py``.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from geartrain.ams.observe import failpoints
from geartrain.ams.values.errors import InvalidArgument, StaleClient
from geartrain.ams.values.shard_messages import WRITE_WINDOW, CallContext, Done, Reply, jobs_of

MAX_STREAMS = 65_536
"""Streams whose completed writes a shard keeps: those that wrote last."""
MAX_FORGOTTEN_STREAMS = 4 * MAX_STREAMS
"""Names kept of streams that it has forgotten: their writes are refused, for they may be repetitions."""


class _Applied(NamedTuple):
    """A write that was applied: by which incarnation, to which table ("": one that was dropped), and its reply."""

    incarnation: int
    table: str
    done: Done


@dataclass
class _WriteStream:
    incarnation: int = 0
    oldest_unacknowledged: int = 0
    acknowledged_by: int = 0
    """Incarnation that said ``oldest_unacknowledged``."""
    done: dict[int, _Applied] = field(default_factory=dict)
    waiting: dict[int, list[Future[Reply]]] = field(default_factory=dict)


class CompletedWrite(NamedTuple):
    """A write that was applied."""

    sequence: int
    created: int
    table: str


class StreamWrites(NamedTuple):
    """What a shard knows of a stream, as snapshots keep it."""

    incarnation: int
    oldest_unacknowledged: int
    done: list[CompletedWrite]


class CompletedWrites:
    """What one shard knows of its writers. Used by its own thread only; memory is bounded by streams × window."""

    def __init__(self, max_streams: int = MAX_STREAMS, max_forgotten: int = MAX_FORGOTTEN_STREAMS) -> None:
        self._max_streams = max_streams
        self._max_forgotten = max_forgotten
        self._streams: dict[str, _WriteStream] = {}
        """Who wrote last comes last."""
        self._forgotten_streams: dict[str, int] = {}
        """Their last incarnation. Who was forgotten last comes last."""
        self._fences: dict[str, int] = {}
        """Lowest incarnation that may write, by job."""
        self.highest_incarnation = 0
        """Of all streams and jobs that were ever here."""
        self._forgotten: dict[str, int] = {}
        """Incarnation below which the writes of a job were forgotten last: a repeated fence must spare those restored
        since."""

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
        stream = self._current(context)
        self._forget_acknowledged(stream, context.oldest_unacknowledged, context.incarnation)
        if context.sequence < stream.oldest_unacknowledged:
            raise StaleClient(
                f"sequence {context.sequence} of stream {context.stream!r} was acknowledged already "
                f"(oldest unacknowledged: {stream.oldest_unacknowledged}); number writes upwards"
            )
        if context.sequence in stream.done and not stream.done[context.sequence].table:
            raise StaleClient(
                f"sequence {context.sequence} of stream {context.stream!r} was applied to a table that was dropped "
                "since; number writes upwards, or begin the job anew: cluster.fence(job, incarnation)"
            )
        if context.sequence in stream.done:
            done = stream.done[context.sequence].done
            future.set_result(Done(created=done.created, duplicate=True))
            return False
        if context.sequence in stream.waiting:
            stream.waiting[context.sequence].append(future)
            return False
        if context.sequence >= max(stream.oldest_unacknowledged, 1) + WRITE_WINDOW:
            raise InvalidArgument(
                f"sequence {context.sequence} of stream {context.stream!r} is more than {WRITE_WINDOW} ahead of the "
                f"oldest unacknowledged write ({stream.oldest_unacknowledged}); acknowledge writes as replies arrive"
            )
        stream.waiting[context.sequence] = [future]
        return True

    def applied(self, context: CallContext, done: Done, table: str) -> None:
        """Remember the write to ``table`` and answer everyone who waits for it."""
        failpoints.reach("shard.mark.before")
        stream = self._streams[context.stream]
        stream.done[context.sequence] = _Applied(context.incarnation, table, done)
        failpoints.reach("shard.mark.after")
        for future in stream.waiting.pop(context.sequence, ()):
            future.set_result(done)

    def dropped(self, table: str) -> None:
        """The rows that these writes changed are gone: a repeated one is refused, and no mark says that it is there."""
        for stream in self._streams.values():
            for sequence, applied in stream.done.items():
                if applied.table == table:
                    stream.done[sequence] = applied._replace(table="")

    def failed(self, context: CallContext, error: BaseException) -> None:
        """Answer everyone who waits with ``error``; the write left no trace and may be sent again."""
        for future in self._streams[context.stream].waiting.pop(context.sequence, ()):
            future.set_exception(error)

    def fence(self, job: str, incarnation: int, *, forget: bool) -> None:
        """From now on refuse the writes of a job's streams with a lower incarnation. Idempotent.

        With ``forget`` also forget those, once. No write of theirs may be waiting. Raises StaleClient if the caller
        was superseded, InvalidArgument if the fence has no name.
        """
        if not job or incarnation < 1:
            raise InvalidArgument(f"a fence needs a job and an incarnation >= 1 (job {job!r}, {incarnation})")
        self._require_current(job, incarnation)
        self._fences[job] = incarnation
        self.highest_incarnation = max(self.highest_incarnation, incarnation)
        if forget and self._forgotten.get(job, 0) < incarnation:
            self._forgotten[job] = incarnation
            for name, last in list(self._forgotten_streams.items()):
                if last < incarnation and job in jobs_of(name):
                    del self._forgotten_streams[name]
            for name in [name for name in self._streams if job in jobs_of(name)]:
                self._forget_before(name, incarnation)

    def require_current(self, context: CallContext) -> None:
        """Raise StaleClient if the caller has a name and was superseded."""
        if context.stream:
            self._require_current(context.stream, context.incarnation)

    def streams(self, tables: Collection[str]) -> dict[str, StreamWrites]:
        """Return what is known of each stream, of the writes applied those to ``tables``."""
        return {
            name: StreamWrites(
                stream.incarnation,
                stream.oldest_unacknowledged,
                [
                    CompletedWrite(sequence, applied.done.created, applied.table)
                    for sequence, applied in stream.done.items()
                    if applied.table in tables
                ],
            )
            for name, stream in self._streams.items()
        }

    def restore(self, name: str, marked: StreamWrites) -> None:
        """Add what :meth:`streams` gave to what is known of a stream: the higher incarnation holds.

        Of a job that has gone back under a lower incarnation than ``marked`` has, these are another cluster's numbers:
        they shut out nobody here, and are forgotten when the job goes back once more.
        """
        if begun := max((self._forgotten.get(job, 0) for job in jobs_of(name)), default=0):
            marked = marked._replace(incarnation=min(marked.incarnation, begun))
        if name in self._forgotten_streams:
            return  # it may have written since
        stream = self._streams.get(name) or self._begin(name)
        stream.incarnation = max(stream.incarnation, marked.incarnation)
        self.highest_incarnation = max(self.highest_incarnation, marked.incarnation)
        self._forget_acknowledged(stream, marked.oldest_unacknowledged, marked.incarnation)
        for write in marked.done:
            known = stream.done.get(write.sequence)
            if write.sequence >= stream.oldest_unacknowledged and (known is None or not known.table):
                stream.done[write.sequence] = _Applied(marked.incarnation, write.table, Done(created=write.created))

    def _current(self, context: CallContext) -> _WriteStream:
        self._require_current(context.stream, context.incarnation)
        if context.stream in self._forgotten_streams:
            raise StaleClient(
                f"stream {context.stream!r} wrote nothing here while {self._max_streams} others did, so that it is not "
                "known any more which of its writes are repetitions; connect anew, or begin the job anew: "
                "cluster.fence(job, incarnation)"
            )
        stream = self._streams.pop(context.stream, None) or self._begin(context.stream)
        self._streams[context.stream] = stream
        if context.incarnation < stream.incarnation:
            raise _superseded(context.stream, context.incarnation, context.stream, stream.incarnation)
        stream.incarnation = context.incarnation
        self.highest_incarnation = max(self.highest_incarnation, context.incarnation)
        return stream

    def _begin(self, name: str) -> _WriteStream:
        """Make a stream; where there are too many, forget the one that has not written for the longest."""
        if len(self._streams) >= self._max_streams:
            idle = next((other for other, stream in self._streams.items() if not stream.waiting), None)
            if idle is not None:
                self._forgotten_streams[idle] = self._streams.pop(idle).incarnation
        if len(self._forgotten_streams) > self._max_forgotten:
            del self._forgotten_streams[next(iter(self._forgotten_streams))]
        stream = self._streams[name] = _WriteStream()
        return stream

    def _require_current(self, name: str, incarnation: int) -> None:
        for job in jobs_of(name) if self._fences else ():
            if incarnation < self._fences.get(job, 0):
                raise _superseded(name, incarnation, job, self._fences[job])

    def _forget_before(self, name: str, incarnation: int) -> None:
        stream = self._streams[name]
        stream.done = {s: applied for s, applied in stream.done.items() if applied.incarnation >= incarnation}
        if stream.acknowledged_by < incarnation:
            stream.oldest_unacknowledged = 0
        if stream.incarnation < incarnation and not stream.waiting:
            del self._streams[name]

    @staticmethod
    def _forget_acknowledged(stream: _WriteStream, oldest_unacknowledged: int, incarnation: int) -> None:
        if oldest_unacknowledged <= stream.oldest_unacknowledged:
            return
        stream.oldest_unacknowledged = oldest_unacknowledged
        stream.acknowledged_by = incarnation
        for sequence in [s for s in stream.done if s < oldest_unacknowledged]:
            del stream.done[sequence]


def _superseded(name: str, incarnation: int, job: str, current: int) -> StaleClient:
    what = f"incarnation {incarnation} of stream {name!r} was superseded"
    by = f"by {current}" if job == name else f"by incarnation {current} of {job!r}"
    return StaleClient(f"{what} {by}: another process writes in its place; stop this one")
