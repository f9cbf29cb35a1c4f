"""Numbered writes that shards apply once, and their delivery to the shards.

A client's stream has a name. Writes without a number of the caller's are numbered here, and their numbers are valid in
this process only. A caller's number, such as its step, means the same after a restart.
"""

from __future__ import annotations

import logging
import threading
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

from geartrain.ams.client.retries import CLOSED
from geartrain.ams.client.rows.row_calls import RowCalls, RowsToWrite, WriteOutcome, WriteReply
from geartrain.ams.client.rows.row_futures import PreparedCall, RowFuture
from geartrain.ams.client.rows.table_plan import TablePlan
from geartrain.ams.client.rows.write_log import WriteLog
from geartrain.ams.kernels._core import PreparedWrite, ScatteredRows
from geartrain.ams.observe import failpoints
from geartrain.ams.values.arguments import checked_name, integer
from geartrain.ams.values.errors import Fenced, GeartrainError, InvalidArgument, StepPartlyApplied, Unavailable
from geartrain.ams.values.shard_messages import WRITE_WINDOW, CallContext, Done, SyncGroup
from geartrain.ams.values.specs import Ids

logger = logging.getLogger(__name__)

_WARN_SECONDS = 10.0
_SHARDS: Callable[[PreparedWrite], Sequence[int]] = attrgetter("shards")


class WriteStream:
    """Numbers the writes of one process. Thread-safe.

    At most ``window`` numbers are open at once, or ``WRITE_WINDOW`` with those of held writes: shards remember that
    many replies.
    """

    def __init__(self, window: int, name: str, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self._window = window
        self._next = 1
        self._open: dict[int, None] = {}
        self._lock = threading.Lock()
        """Held to begin a write. Not a Condition: Ctrl-C on the main thread would leave one locked (see
        geartrain.ams.values.interrupts)."""
        self._waiting: deque[threading.Lock] = deque()
        """Locks of the threads that wait in :meth:`reserve`."""
        self._is_closed = False
        self.is_closing = False
        """If set, a write may begin, but waits at most :data:`_WARN_SECONDS` for another one to end."""

    def reserve(self, begun: list[int], count: int = 1, *, is_held: bool = False) -> None:
        """Append the next ``count`` numbers to ``begun``, so that they can be ended even if the caller is interrupted.

        Blocks while the oldest open write is a whole window behind. ``is_held``: the caller may prepare more writes
        before it sends this one, such as those of all modules at a step, and would block itself. Raises
        InvalidArgument, and Unavailable once the stream is closed.
        """
        if count > WRITE_WINDOW:  # shards would apply some, and always refuse the others
            raise InvalidArgument(
                f"{count:,} tables are written at once; at most {WRITE_WINDOW:,} can be, for shards remember so many. "
                "Train them in several groups, each with a RowOptimizer of its own"
            )
        window = max(WRITE_WINDOW if is_held else self._window, count)
        ended: threading.Lock | None = None
        while not self._is_closed:
            with self._lock:
                first = self._next
                oldest = min(list(self._open), default=first)
                if first + count - oldest <= window:
                    numbers = range(first, first + count)
                    self._open.update(dict.fromkeys(numbers))  # before _next shows them: oldest() takes no lock
                    self._next = first + count
                    begun.extend(numbers)
                    return
            if ended is None:  # look once more: a number may have ended before this thread waited
                ended = threading.Lock()
                ended.acquire()
                self._waiting.append(ended)
                continue
            if not ended.acquire(timeout=_WARN_SECONDS):
                logger.warning(
                    "write %d waits for write %d, which was prepared %d writes ago: send it, or abandon() it",
                    *(first, oldest, first - oldest),
                )
                if self.is_closing:  # else closing the cluster would wait for this write, and each behind it
                    self.close()
            ended = None
        raise Unavailable(CLOSED)

    def close(self) -> None:
        """Stop waits for writes that were prepared and are not sent."""
        self._is_closed = True
        self.finish()

    def finish(self, *sequences: int) -> None:
        """Record that writes are acknowledged or abandoned: they are not sent again. Does not block: the garbage
        collector calls it, at any place of any thread.
        """
        for sequence in sequences:
            self._open.pop(sequence, None)
        while self._waiting:
            with suppress(IndexError):  # another thread has released it
                self._waiting.popleft().release()

    def oldest(self) -> int:
        """Return the number below which every write was acknowledged or abandoned."""
        following = self._next  # read first: writes that begin meanwhile are not below it
        return min(list(self._open), default=following)


@dataclass(frozen=True)
class GivenNumber:
    """Number that the caller gave to one write."""

    name: str
    incarnation: int
    sequence: int
    acknowledged: Callable[[], int]

    def reserve(self, begun: list[int], count: int = 1, *, is_held: bool = False) -> None:  # noqa: ARG002
        """Append the given number to ``begun``."""
        begun.append(self.sequence)

    def finish(self, *sequences: int) -> None:
        """Do nothing: this process or the next may send it again, until :meth:`ClientStream.acknowledge`."""

    def oldest(self) -> int:
        """Return the oldest number that is not acknowledged."""
        return self.acknowledged()


Numbers = WriteStream | GivenNumber
"""Source of a write's number. Thread-safe."""


class ClientStream:
    """Write numbers of one client: its own and those given by the caller. Thread-safe.

    Without a name it succeeds no process. With one, the shards refuse lower incarnations of the same name.
    """

    def __init__(self, window: int, name: str | None = None, incarnation: int = 1) -> None:
        self.is_named = name is not None
        self.name = uuid.uuid4().hex if name is None else name
        self.incarnation = incarnation
        self.acknowledged = 0
        """Numbers below this one that the caller gave are not used again."""
        # Numbers start again with every incarnation, so each named one has a stream of its own.
        own = f"{self.unnumbered}/{self.incarnation}" if self.is_named else self.name
        self._unnumbered = WriteStream(window, own, self.incarnation)

    def close_soon(self) -> None:
        """Let waiting writes begin, but no longer wait for writes that are never sent."""
        self._unnumbered.is_closing = True

    def close(self) -> None:
        """Refuse new writes, and end all waits to begin one."""
        self._unnumbered.close()

    @property
    def unnumbered(self) -> str:
        """Job name that fences the writes without a caller's number."""
        return f"{self.name}/process"

    @property
    def caller(self) -> CallContext | None:
        """Identity of the caller for calls other than writes, which the present incarnation alone may make; None: no
        name."""
        return CallContext(stream=self.name, incarnation=self.incarnation) if self.is_named else None

    def numbers(self, table: str, sequence: int | None) -> Numbers:
        """Return the source of numbers for a write to ``table``. Raises InvalidArgument."""
        if sequence is None:
            return self._unnumbered
        if not self.is_named:
            raise InvalidArgument(
                f"sequence {sequence} can only be recognised after a restart in a stream that has a name; give "
                "stream='job/rank0' to connect()"
            )
        low = max(self.acknowledged, 1)
        sequence = integer("sequence", sequence, 1)
        if not low <= sequence < low + WRITE_WINDOW:
            raise InvalidArgument(
                f"sequence {sequence} is outside [{low}, {low + WRITE_WINDOW}): shards remember {WRITE_WINDOW} writes "
                "from the oldest that may be sent again; name that one with cluster.acknowledge(sequence)"
            )
        return GivenNumber(f"{self.name}/table/{table}", self.incarnation, sequence, lambda: self.acknowledged)

    def acknowledge(self, sequence: int) -> None:
        """Declare that no write below ``sequence`` is sent again. Shards learn it with the next numbered write."""
        self.acknowledged = max(self.acknowledged, integer("sequence", sequence, 0, 2**63 - 1))


def check_stream(name: str | None, incarnation: int | None) -> None:
    """Raise InvalidArgument unless a client may write under ``name`` (None: none) and ``incarnation`` (None: any)."""
    if name is None and incarnation is not None:
        raise InvalidArgument(f"incarnation is {incarnation}, and no stream is named; name it: stream='job/rank0'")
    if name is not None:
        checked_name("stream", name)
    if incarnation is not None:
        checked_incarnation(incarnation)


def checked_incarnation(incarnation: int) -> int:
    """Return the checked incarnation of a stream or job. Raises InvalidArgument."""
    return integer("incarnation", incarnation, 1, 2**63 - 1)


class Write(ABC):
    """A prepared write: numbered and split by shard. :meth:`send` may be repeated after an error.

    A repeated send reaches only the shards that have not answered, under the same number, so that no shard applies the
    write twice. A write to several tables has a number for each. Not thread-safe.
    """

    _begun: list[int] | tuple[()] = ()
    """Numbers of the write, as soon as they are open."""

    _logged: Sequence[int | None] = ()
    """Number in the write log for each table, once announced, if the log has readers."""

    def __init__(
        self,
        numbers: Numbers,
        tables: Sequence[TablePlan],
        shards: Sequence[Sequence[int]],
        group: SyncGroup | None = None,
        log: WriteLog | None = None,
        ids: Sequence[Ids] = (),
        *,
        is_held: bool = False,
    ) -> None:
        """Prepare a write to the present ``tables``: half of it may be lost with a table that is restored later.

        ``shards``: of each table those with a part. ``group``: the write is one rank's part of a joint step. ``log``
        receives the ``ids`` of each table whose rows it touches. ``is_held``: as in :meth:`WriteStream.reserve`.
        """
        self.shards = shards
        self._numbers = numbers
        self._tables = tables
        self._log, self._ids = log, ids
        self._pending = list(shards)
        """Shards of each table that have not answered."""
        self._group = group
        self._created = [0] * len(shards)
        self._duplicate = False
        begun: list[int] = []
        self._begun = begun
        numbers.reserve(begun, len(shards), is_held=is_held)

    def __del__(self) -> None:
        """End the numbers of a write that no caller holds, which would otherwise stay open for ever."""
        if self._begun:
            self._close()

    @property
    def is_on_a_shard(self) -> bool:
        """Whether some shard has confirmed its part."""
        return any(len(left) < len(asked) for left, asked in zip(self._pending, self.shards, strict=True))

    @property
    def is_sent(self) -> bool:
        """Whether every shard has confirmed its part."""
        return not any(self._pending)

    @abstractmethod
    def send(self) -> Done:
        """Send to every shard that has not answered yet; return the joint reply.

        Raises the first GeartrainError of a shard; shards that answered keep the write, and the same write may be sent
        again to the others. Raises StepPartlyApplied if it is one rank's part of a joint step that some shards have
        applied and one refuses.
        """

    def announce(self) -> None:
        """Record in the write log that the rows change from now on. :meth:`send` does so, too."""
        if self._log is not None and self._log.readers and not self._logged:
            pairs = zip(self._tables, self._ids, strict=True)
            self._logged = [self._log.start(table.spec.name, ids) for table, ids in pairs]

    def abandon(self) -> None:
        """Abandon the write. Whether shards that have not answered applied it is unknown."""
        self._pending = [()] * len(self.shards)
        self._close()

    def _close(self) -> None:
        """End its numbers: it is not sent again."""
        self._numbers.finish(*self._begun)
        self._begun = ()
        for number in self._logged:
            if self._log is not None and number is not None:
                self._log.finish(number)

    def _record_replies(self, replies: Sequence[WriteReply]) -> Done:
        """Record an attempt's outcome for each unfinished table; return the joint reply of all attempts, or raise."""
        failed: list[tuple[int, int, BaseException]] = []
        said = iter(replies)
        for place, pending in enumerate(self._pending):
            if not pending:
                continue
            reply = next(said)
            if isinstance(reply, tuple):
                self._created[place] += reply[0]
                self._duplicate |= reply[1]
                self._pending[place] = ()
            else:
                failed += self._failed_of(place, reply)
        if failed:
            first_error = self._error_of(failed)
            try:
                raise first_error
            finally:
                del first_error, failed, replies, said, reply  # or the error would hold the arrays
        failpoints.reach("client.reply.after")
        self._close()
        return Done(created=sum(self._created), duplicate=self._duplicate)

    def _failed_of(self, place: int, outcomes: Sequence[WriteOutcome]) -> list[tuple[int, int, BaseException]]:
        """Record the answers of a table's remaining shards; return those that failed."""
        failed: list[tuple[int, int, BaseException]] = []
        for shard, outcome in zip(self._pending[place], outcomes, strict=True):
            if isinstance(outcome, Done):
                self._created[place] += outcome.created
                self._duplicate |= outcome.duplicate
            else:
                failed.append((place, shard, outcome))
        self._pending[place] = [shard for _, shard, _ in failed]
        return failed

    def _error_of(self, failed: Sequence[tuple[int, int, BaseException]]) -> BaseException:
        """Return the error to raise for some shards: the first, unless a step is half applied for good."""
        for place, shard, error in failed:
            if isinstance(error, GeartrainError) and not isinstance(error, Unavailable | Fenced):
                group, name, asked = self._group, self._tables[place].spec.name, len(self.shards[place])
                applied = asked - len(self._pending[place])
                if applied and group is not None:
                    partly = StepPartlyApplied(
                        f"step {group.sequence} of job {group.job!r} was applied to table {name!r} by "
                        f"{applied} of {asked} shards and refused by shard {shard}: {error}. "
                        "The table holds half of the step: stop all ranks and go back to their last snapshot"
                    )
                    partly.__cause__ = error
                    return partly
                break
        return failed[0][2]


Deliver = Callable[[Sequence[int], CallContext], Sequence[WriteOutcome]]
"""Function that sends a write to some of its shards; returns each one's answer."""


class MessageWrite(Write):
    """A write to one table without rows: removed ids, or gradients of a hosted model."""

    def __init__(
        self,
        numbers: Numbers,
        shards: Sequence[int],
        deliver: Deliver,
        table: TablePlan,
        group: SyncGroup | None = None,
        log: WriteLog | None = None,
        ids: Ids | None = None,
        *,
        is_held: bool = False,
    ) -> None:
        self._deliver = deliver
        super().__init__(numbers, [table], [shards], group, log, [] if ids is None else [ids], is_held=is_held)

    def send(self) -> Done:
        failpoints.reach("client.send.before")
        self.announce()
        (pending,) = self._pending
        context = CallContext(
            stream=self._numbers.name,
            incarnation=self._numbers.incarnation,
            sequence=self._begun[0] if self._begun else 0,
            oldest_unacknowledged=self._numbers.oldest(),
            table_incarnation=self._tables[0].incarnation,
        )
        return self._record_replies([self._deliver(pending, context)] if pending else [])


class WrittenPart(NamedTuple):
    """Outcome of one table's part of a write of rows."""

    shards: Sequence[int]
    """Shards that have rows of it."""
    created: int
    """Rows created on the shards that have answered."""
    log_number: int | None
    """Its number in the write log, once announced, if the log has readers."""


class RowWrite(Write):
    """A write of rows to one table or several. Several RowWrites can be sent together."""

    def __init__(
        self,
        rows: RowCalls,
        numbers: Numbers,
        tables: Sequence[TablePlan],
        prepared: Sequence[PreparedWrite],
        ids: Sequence[Ids],
        group: SyncGroup | None = None,
        *,
        is_held: bool = False,
    ) -> None:
        """``ids`` are those of the rows."""
        self._rows = rows
        self._prepared = prepared
        super().__init__(numbers, tables, list(map(_SHARDS, prepared)), group, rows.write_log, ids, is_held=is_held)

    def part(self, place: int) -> WrittenPart:
        """Return the outcome for the table at this place."""
        return WrittenPart(self.shards[place], self._created[place], self._logged[place] if self._logged else None)

    def copy_rows(self) -> None:
        """Copy unsent rows: from now on the caller may reuse its arrays."""
        if not self.is_sent:
            for prepared in self._prepared:
                prepared.keep_rows()

    def send(self) -> Done:
        failpoints.reach("client.send.before")
        requests = self._rows_to_send()
        return self._record_replies(self._rows.write(requests) if requests else ())

    def send_with(self, others: Sequence[RowWrite]) -> None:
        """:meth:`send` this write and others, in one request to each shard.

        Raises the first error once all were sent. A repetition reaches only the shards that have not answered.
        """
        left = [write for write in (self, *others) if not write.is_sent]
        errors = []
        for rows in dict.fromkeys([write._rows for write in left]):
            failpoints.reach("client.send.before")
            together = [(write, write._rows_to_send()) for write in left if write._rows is rows]
            replies = iter(rows.write([request for _, requests in together for request in requests]))
            for write, requests in together:
                try:
                    write._record_replies([next(replies) for _ in requests])
                except GeartrainError as exc:
                    errors.append(exc)
            del replies  # as in _record_replies
        if errors:
            try:
                raise errors[0]
            finally:
                del errors

    def send_and_pull(self, out: ScatteredRows) -> tuple[Done, tuple[int, ...] | None]:
        """:meth:`send` a push of one table without a group, and read its rows, as :meth:`RowCalls.write_and_pull`."""
        if self.is_sent or self.is_on_a_shard:
            return self.send(), None
        failpoints.reach("client.send.before")
        reply, writes = self._rows.write_and_pull(self._rows_to_send()[0], out)
        return self._record_replies([reply]), writes

    def to_begin(self) -> PreparedCall:
        """Return this unsent write of one table for :meth:`RowCalls.start`. It is abandoned if it fails."""
        failpoints.reach("client.send.before")
        requests: list[RowsToWrite] = []

        def send(future: RowFuture) -> bool:
            requests[:] = self._rows_to_send(or_nothing=True)
            return self._rows.start_write(requests[0], future)

        def finish(reply: Any) -> Done:
            try:
                return self._record_replies([self._rows.written(requests[0], reply)])
            except BaseException:
                self.abandon()
                raise

        return PreparedCall(send, finish, self.abandon)

    def _rows_to_send(self, *, or_nothing: bool = False) -> list[RowsToWrite]:
        """Return the requests to send now, of each unfinished table; ``or_nothing``: also of one without rows."""
        if self._rows.write_log.readers:
            self.announce()
        stream, incarnation, oldest = self._numbers.name, self._numbers.incarnation, self._numbers.oldest()
        requests: list[RowsToWrite] = []
        parts = zip(self._prepared, self._begun, self._tables, self._pending, strict=False)  # none once all are done
        for prepared, sequence, table, pending in parts:
            if pending or or_nothing:
                requests.append((prepared, (stream, incarnation, sequence, oldest, table.incarnation), pending))
        return requests


def send_once(write: Write) -> Done:
    """Send a write that is never repeated: after an error it is abandoned."""
    try:
        return write.send()
    except BaseException:
        write.abandon()
        raise
