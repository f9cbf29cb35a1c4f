"""Writes that are applied once: their numbers, and writes on their way to their shards.

A client's stream has a name. The writes that nobody numbers are numbered here, and their numbers mean something in
this process only. A caller may number writes itself, by its step: such a number means the same after a restart.
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

    At most ``window`` numbers are open at once, and with those of held writes ``WRITE_WINDOW``: the shards remember
    replies only that far.
    """

    def __init__(self, window: int, name: str, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self._window = window
        self._next = 1
        self._open: dict[int, None] = {}
        self._lock = threading.Lock()
        """For who begins. Not a Condition: Ctrl-C on the main thread would leave one locked (see
        geartrain.ams.values.interrupts)."""
        self._waiting: deque[threading.Lock] = deque()
        """Locks that :meth:`reserve` waits for."""
        self._is_closed = False
        self.is_closing = False
        """Set, a write begins yet, but waits no longer than :data:`_WARN_SECONDS` for another one to end."""

    def reserve(self, begun: list[int], count: int = 1, *, is_held: bool = False) -> None:
        """Add the next ``count`` numbers to ``begun``: whatever breaks the caller off, who has that can end them.

        Blocks while the oldest open write is a whole window behind. ``is_held``: the caller may prepare others before
        it sends this one, as those of all modules at a step, and would wait for itself. Raises InvalidArgument, and
        Unavailable once the stream is closed.
        """
        if count > WRITE_WINDOW:  # shards would apply some, and refuse the others however often they are sent
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
                    self._open.update(dict.fromkeys(numbers))  # before _next says so: oldest() takes no lock
                    self._next = first + count
                    begun.extend(numbers)
                    return
            if ended is None:  # to be looked for once more: a number may have ended before somebody waited for that
                ended = threading.Lock()
                ended.acquire()
                self._waiting.append(ended)
                continue
            if not ended.acquire(timeout=_WARN_SECONDS):
                logger.warning(
                    "write %d waits for write %d, which was prepared %d writes ago: send it, or abandon() it",
                    *(first, oldest, first - oldest),
                )
                if self.is_closing:  # else whoever ends the cluster waits for this one, and for each behind it
                    self.close()
            ended = None
        raise Unavailable(CLOSED)

    def close(self) -> None:
        """Nobody waits any more for a write that was prepared and is not sent."""
        self._is_closed = True
        self.finish()

    def finish(self, *sequences: int) -> None:
        """The writes are acknowledged, or given up: they will not be sent again. Waits for nothing: the garbage
        collector calls it, at any place of any thread.
        """
        for sequence in sequences:
            self._open.pop(sequence, None)
        while self._waiting:
            with suppress(IndexError):  # another thread has let it go on
                self._waiting.popleft().release()

    def oldest(self) -> int:
        """The number below which every write was acknowledged, or given up."""
        following = self._next  # read first: what begins meanwhile is not below it
        return min(list(self._open), default=following)


@dataclass(frozen=True)
class GivenNumber:
    """The number that the caller gave to one write."""

    name: str
    incarnation: int
    sequence: int
    acknowledged: Callable[[], int]

    def reserve(self, begun: list[int], count: int = 1, *, is_held: bool = False) -> None:  # noqa: ARG002
        """See :class:`WriteStream`."""
        begun.append(self.sequence)

    def finish(self, *sequences: int) -> None:
        """It may be sent again, by this process or the next: :meth:`ClientStream.acknowledge` ends it."""

    def oldest(self) -> int:
        """See :class:`WriteStream`."""
        return self.acknowledged()


Numbers = WriteStream | GivenNumber
"""Where a write has its number from. Thread-safe."""


class ClientStream:
    """The writes of one client: those it numbers and those it does not. Thread-safe.

    Without a name it is nobody's successor. With one, the shards refuse lower incarnations of the same name.
    """

    def __init__(self, window: int, name: str | None = None, incarnation: int = 1) -> None:
        self.is_named = name is not None
        self.name = uuid.uuid4().hex if name is None else name
        self.incarnation = incarnation
        self.acknowledged = 0
        """Numbers below this one that the caller gave are not used again."""
        # Named, its numbers begin anew with every incarnation, so each has a stream of its own.
        own = f"{self.unnumbered}/{self.incarnation}" if self.is_named else self.name
        self._unnumbered = WriteStream(window, own, self.incarnation)

    def close_soon(self) -> None:
        """Let begin what was asked for, but not wait for writes that nobody sends."""
        self._unnumbered.is_closing = True

    def close(self) -> None:
        """No write begins any more, and nobody waits to begin one."""
        self._unnumbered.close()

    @property
    def unnumbered(self) -> str:
        """The job that fences the writes that nobody numbered."""
        return f"{self.name}/process"

    @property
    def caller(self) -> CallContext | None:
        """Who calls, for what is no write but only the present incarnation may do; None without a name."""
        return CallContext(stream=self.name, incarnation=self.incarnation) if self.is_named else None

    def numbers(self, table: str, sequence: int | None) -> Numbers:
        """Return where a write to ``table`` has its number from. Raises InvalidArgument."""
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
        """No write numbered below ``sequence`` is sent again. Shards learn it with the next numbered write."""
        self.acknowledged = max(self.acknowledged, integer("sequence", sequence, 0, 2**63 - 1))


def check_stream(name: str | None, incarnation: int | None) -> None:
    """Raise InvalidArgument unless a client may write under ``name`` (None: none) and ``incarnation`` (None: any)."""
    if name is None and incarnation is not None:
        raise InvalidArgument(f"incarnation {incarnation} is that of no stream; name it: stream='job/rank0'")
    if name is not None:
        checked_name("stream", name)
    if incarnation is not None:
        checked_incarnation(incarnation)


def checked_incarnation(incarnation: int) -> int:
    """Return the incarnation of a stream or job. Raises InvalidArgument."""
    return integer("incarnation", incarnation, 1, 2**63 - 1)


class Write(ABC):
    """A write, prepared: numbered and cut by shard. :meth:`send` may be called again after an error.

    A repeated send reaches only the shards that have not answered, under the same number, so that no shard applies
    the write twice. One of several tables has a number for each. Not thread-safe.
    """

    _begun: list[int] | tuple[()] = ()
    """Its numbers, as soon as they are open."""

    _logged: Sequence[int | None] = ()
    """Of each table its number in the log of writes, once it was announced and where somebody reads that."""

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
        """The ``tables`` that are there now are meant, for half of a write may be lost with one that is restored later.

        ``shards``: of each table those that have a part. ``group``: it is one rank's part of a joint step. ``log`` is
        told of the ``ids`` of each table whose rows it touches. ``is_held``: see :meth:`WriteStream.reserve`.
        """
        self.shards = shards
        self._numbers = numbers
        self._tables = tables
        self._log, self._ids = log, ids
        self._pending = list(shards)
        """Of each table those that have not answered."""
        self._group = group
        self._created = [0] * len(shards)
        self._duplicate = False
        begun: list[int] = []
        self._begun = begun
        numbers.reserve(begun, len(shards), is_held=is_held)

    def __del__(self) -> None:
        """Nobody can send what nobody holds: else a number would stay open for ever."""
        if self._begun:
            self._close()

    @property
    def is_on_a_shard(self) -> bool:
        """Whether a shard has answered that it has applied its part."""
        return any(len(left) < len(asked) for left, asked in zip(self._pending, self.shards, strict=True))

    @property
    def is_sent(self) -> bool:
        """Whether every shard has answered that it has applied its part."""
        return not any(self._pending)

    @abstractmethod
    def send(self) -> Done:
        """Send to every shard that has not answered yet; return the joint reply.

        Raises the first GeartrainError of a shard; the shards that answered keep the write, the others may be tried
        again with the same write. Raises StepPartlyApplied if it is one rank's part of a joint step that some shards
        have applied and one refuses.
        """

    def announce(self) -> None:
        """Let those who keep rows know that these change from now on. To send it does so, too."""
        if self._log is not None and self._log.readers and not self._logged:
            pairs = zip(self._tables, self._ids, strict=True)
            self._logged = [self._log.start(table.spec.name, ids) for table, ids in pairs]

    def abandon(self) -> None:
        """Give the write up. On shards that have not answered it is unknown whether it was applied."""
        self._pending = [()] * len(self.shards)
        self._close()

    def _close(self) -> None:
        """It is not sent again."""
        self._numbers.finish(*self._begun)
        self._begun = ()
        for number in self._logged:
            if self._log is not None and number is not None:
                self._log.finish(number)

    def _record_replies(self, replies: Sequence[WriteReply]) -> Done:
        """Note what an attempt has come to, of each table that was not done; return the joint reply of all attempts, or
        raise.
        """
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
        """Note what each shard has answered that was left of a table; return those that have not done their part."""
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
        """What to raise for the errors of some shards: the first, unless a step is half applied for good."""
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
"""Sends a write to some of its shards; returns what each of them answered."""


class MessageWrite(Write):
    """A write to one table that carries no rows: removed ids, or gradients of a hosted model."""

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
    """What became of one table's part of a write of rows."""

    shards: Sequence[int]
    """Those that have rows of it."""
    created: int
    """Rows that it has made on the shards that have answered."""
    log_number: int | None
    """Its number in the log of writes, once it was announced and where somebody reads that."""


class RowWrite(Write):
    """A write of rows, of one table or several. Several of them can be sent together."""

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
        """What became of the part of the table at this place."""
        return WrittenPart(self.shards[place], self._created[place], self._logged[place] if self._logged else None)

    def copy_rows(self) -> None:
        """Copy what is not sent yet: from now on its arrays are the caller's own."""
        if not self.is_sent:
            for prepared in self._prepared:
                prepared.keep_rows()

    def send(self) -> Done:
        failpoints.reach("client.send.before")
        requests = self._rows_to_send()
        return self._record_replies(self._rows.write(requests) if requests else ())

    def send_with(self, others: Sequence[RowWrite]) -> None:
        """:meth:`send` this one and others: what goes to a shard, in one request for all of them.

        Raises the first error once all were sent. Who sends them again reaches only the shards that have not answered.
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
            del replies  # see _settle
        if errors:
            try:
                raise errors[0]
            finally:
                del errors

    def send_and_pull(self, out: ScatteredRows) -> tuple[Done, tuple[int, ...] | None]:
        """:meth:`send` a push of one table and no group, and read its rows; see :meth:`RowCalls.write_and_pull`."""
        if self.is_sent or self.is_on_a_shard:
            return self.send(), None
        failpoints.reach("client.send.before")
        reply, writes = self._rows.write_and_pull(self._rows_to_send()[0], out)
        return self._record_replies([reply]), writes

    def to_begin(self) -> PreparedCall:
        """This write of one table, not sent yet, for :meth:`RowCalls.start`. It is given up where it fails."""
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
        """What is sent now, of each table not done; ``or_nothing``: of one that has no rows to send, too."""
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
    """Send a write that nobody will send again: after an error it is abandoned."""
    try:
        return write.send()
    except BaseException:
        write.abandon()
        raise
