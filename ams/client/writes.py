"""Writes that are applied once: their numbers, and one write on its way to its shards.

A client's stream has a name. The writes that nobody numbers are numbered here, and their numbers mean something in
this process only. A caller may number writes itself, by its step: such a number means the same after a restart.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from geartrain.ams.client.rows.row_calls import RowCalls, WriteOutcome
from geartrain.ams.client.rows.row_futures import PreparedCall, RowFuture
from geartrain.ams.kernels._core import PreparedWrite, ScatteredRows
from geartrain.ams.observe import failpoints
from geartrain.ams.values.arguments import checked_name, integer
from geartrain.ams.values.errors import Fenced, GeartrainError, InvalidArgument, StepPartlyApplied, Unavailable
from geartrain.ams.values.shard_messages import WRITE_WINDOW, CallContext, Done, SyncGroup
from geartrain.ams.values.specs import Ids

logger = logging.getLogger(__name__)

_WARN_SECONDS = 10.0


class Numbers(Protocol):
    """Where a write has its number from. Thread-safe."""

    def begin(self, begun: list[int]) -> None:
        """Add the number of a write that begins to ``begun``, before it is open: whatever breaks this off, who has
        ``begun`` can end it.
        """

    def end(self, sequence: int) -> None:
        """The write is acknowledged, or given up: it will not be sent again."""

    def context(self, sequence: int, table_incarnation: int = 0) -> CallContext:
        """Return what travels with the write, which means this table of its name (0: any)."""


class WriteStream:
    """Numbers the writes of one process. Thread-safe.

    At most ``window`` numbers are open at once: the shards remember replies only that far.
    """

    def __init__(self, window: int, name: str, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self._window = window
        self._next = 1
        self._open: set[int] = set()
        # Not a Condition: Ctrl-C on the main thread would leave one locked (see geartrain.ams.values.interrupts).
        self._lock = threading.Lock()
        self._ended: deque[int] = deque()
        """Numbers that are to leave ``_open``."""
        self._waiting: list[threading.Lock] = []
        """Locks that :meth:`begin` waits for."""

    def begin(self, begun: list[int]) -> None:
        """Add the next number; blocks while the oldest open write is a whole window behind. See :class:`Numbers`."""
        while True:
            ended = threading.Lock()
            self._drain()
            with self._lock:
                waiting, oldest = self._next, self._oldest()
                is_free = waiting - oldest < self._window
                if is_free:
                    begun.append(waiting)
                    self._open.add(waiting)
                    self._next += 1
                else:
                    ended.acquire()
                    self._waiting.append(ended)
            self._drain()
            if is_free:
                return
            if not ended.acquire(timeout=_WARN_SECONDS):
                # Not while others wait for the lock: a log may take its time.
                logger.warning(
                    "write %d waits for write %d, which was prepared %d writes ago: send it, or abandon() it",
                    waiting,
                    oldest,
                    self._window,
                )

    def end(self, sequence: int) -> None:
        """See :class:`Numbers`. Waits for nothing: the garbage collector calls it, at any place of any thread."""
        self._ended.append(sequence)
        self._drain()

    def context(self, sequence: int, table_incarnation: int = 0) -> CallContext:
        self._drain()
        with self._lock:
            oldest = self._oldest()
        self._drain()
        return CallContext(
            stream=self.name,
            incarnation=self.incarnation,
            sequence=sequence,
            oldest_unacknowledged=oldest,
            table_incarnation=table_incarnation,
        )

    def _drain(self) -> None:
        """Take up what has ended. To be called after the lock was held, too: numbers may have ended meanwhile."""
        while self._ended and self._lock.acquire(blocking=False):
            try:
                while self._ended:
                    self._open.discard(self._ended.popleft())
                waiting, self._waiting = self._waiting, []
            finally:
                self._lock.release()
            for waiter in waiting:
                waiter.release()

    def _oldest(self) -> int:
        return min(self._open, default=self._next)


@dataclass(frozen=True)
class _Given:
    """The number that the caller gave to one write."""

    client: ClientStream
    table: str
    sequence: int

    def begin(self, begun: list[int]) -> None:
        begun.append(self.sequence)

    def end(self, sequence: int) -> None:
        """It may be sent again, by this process or the next: :meth:`ClientStream.acknowledge` ends it."""

    def context(self, sequence: int, table_incarnation: int = 0) -> CallContext:
        return CallContext(
            stream=f"{self.client.name}/table/{self.table}",
            incarnation=self.client.incarnation,
            sequence=sequence,
            oldest_unacknowledged=self.client.acknowledged,
            table_incarnation=table_incarnation,
        )


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
        return _Given(self, table, sequence)

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


Deliver = Callable[[Sequence[int], CallContext], Sequence[WriteOutcome]]
"""Sends a write to some of its shards; returns what each of them answered."""


class Write:
    """One write, prepared: it has its number and its calls. :meth:`send` may be called again after an error.

    A repeated send reaches only the shards that have not answered, under the same number, so that no shard applies
    the write twice. Not thread-safe.
    """

    _begun: Sequence[int] = ()
    """Its number, as soon as that is open."""

    def __init__(
        self,
        numbers: Numbers,
        shards: Sequence[int],
        deliver: Deliver,
        table: str,
        table_incarnation: int,
        group: SyncGroup | None = None,
    ) -> None:
        """``table_incarnation``: the table that is there now is meant, for half of the write may be lost with one that
        is restored later. ``group``: it is one rank's part of a joint step.
        """
        self._numbers = numbers
        self._num_shards = len(shards)
        self._pending = shards
        """Those that have not answered."""
        self._deliver = deliver
        self._table = table
        self._table_incarnation = table_incarnation
        self._group = group
        self._created = 0
        self._duplicate = False
        begun: list[int] = []
        self._begun = begun
        numbers.begin(begun)
        self._sequence = begun[0]

    def __del__(self) -> None:
        """Nobody can send what nobody holds: else a number would stay open for ever."""
        for sequence in self._begun:
            self._numbers.end(sequence)

    @property
    def is_on_a_shard(self) -> bool:
        """Whether a shard has answered that it has applied its part."""
        return len(self._pending) < self._num_shards

    @property
    def is_sent(self) -> bool:
        """Whether every shard has answered that it has applied its part."""
        return not self._pending

    def send(self) -> Done:
        """Send to every shard that has not answered yet; return the joint reply.

        Raises the first GeartrainError of a shard; the shards that answered keep the write, the others may be tried
        again with the same write. Raises StepPartlyApplied if it is one rank's part of a joint step that some shards
        have applied and one refuses.
        """
        context = self._begin()
        return self._end(self._deliver(self._pending, context) if self._pending else ())

    def _begin(self) -> CallContext:
        failpoints.reach("client.send.before")
        return self._numbers.context(self._sequence, self._table_incarnation)

    def _end(self, outcomes: Sequence[WriteOutcome]) -> Done:
        """What an attempt has come to, shard by shard of those that had not answered."""
        failed: list[tuple[int, BaseException]] = []
        for shard, outcome in zip(self._pending, outcomes, strict=True):
            if isinstance(outcome, Done):
                self._created += outcome.created
                self._duplicate |= outcome.duplicate
            else:
                failed.append((shard, outcome))
        self._pending = [shard for shard, _ in failed]
        if failed:
            first_error = self._error_of(failed)
            try:
                raise first_error
            finally:
                del first_error, failed, outcomes, outcome  # or the error would hold the arrays, by way of this frame
        failpoints.reach("client.reply.after")
        self._numbers.end(self._sequence)
        return Done(created=self._created, duplicate=self._duplicate)

    def _error_of(self, failed: Sequence[tuple[int, BaseException]]) -> BaseException:
        """What to raise for the errors of some shards: the first, unless a step is half applied for good."""
        for shard, error in failed:
            if isinstance(error, GeartrainError) and not isinstance(error, Unavailable | Fenced):
                if self.is_on_a_shard and self._group is not None:
                    return self._partly_applied(shard, error, self._group)
                break
        return failed[0][1]

    def _partly_applied(self, shard: int, error: GeartrainError, group: SyncGroup) -> GeartrainError:
        """What it means that a shard refused its part of a joint step and another applied its own: half of a step."""
        partly = StepPartlyApplied(
            f"step {group.sequence} of job {group.job!r} was applied to table {self._table!r} by "
            f"{self._num_shards - len(self._pending)} of {self._num_shards} shards and refused by shard {shard}: "
            f"{error}. The table holds half of the step: stop all ranks and go back to their last snapshot"
        )
        partly.__cause__ = error
        return partly

    def abandon(self) -> None:
        """Give the write up. On shards that have not answered it is unknown whether it was applied."""
        self._pending = []
        self._numbers.end(self._sequence)


def _deliver_rows(
    rows: RowCalls, prepared: PreparedWrite, shards: Sequence[int], context: CallContext
) -> Sequence[WriteOutcome]:
    return rows.write([(prepared, shards, context)])[0]


class RowWrite(Write):
    """A write of rows. Several of them can be sent together."""

    _logged: int | None = None
    """Its number in the log of writes."""

    def __init__(
        self,
        numbers: Numbers,
        prepared: PreparedWrite,
        rows: RowCalls,
        table: str,
        table_incarnation: int,
        ids: Ids,
        group: SyncGroup | None = None,
    ) -> None:
        """``ids`` are those of the rows."""
        # No method of its own: it would hold itself, and its number for as long.
        deliver = partial(_deliver_rows, rows, prepared)
        super().__init__(numbers, prepared.shards, deliver, table, table_incarnation, group)
        self._prepared = prepared
        self._rows = rows
        self._ids = ids

    def __del__(self) -> None:
        super().__del__()
        self._is_over()

    @property
    def shards(self) -> Sequence[int]:
        """Those that have a part of it."""
        return self._prepared.shards

    @property
    def log_number(self) -> int | None:
        """Its number in the log of writes, once it was announced and where somebody reads that."""
        return self._logged

    @property
    def created(self) -> int:
        """Rows that it has made on the shards that have answered."""
        return self._created

    def announce(self) -> None:
        """Let those who keep rows know that these change from now on. To send it does so, too."""
        if self._logged is not None:
            return
        log = self._rows.write_log
        self._logged = log.begin(self._table, self._ids)

    def _begin(self) -> CallContext:
        self.announce()
        return super()._begin()

    def _end(self, outcomes: Sequence[WriteOutcome]) -> Done:
        done = super()._end(outcomes)
        self._is_over()
        return done

    def _is_over(self) -> None:
        if self._logged is not None:
            self._rows.write_log.end(self._logged)

    def abandon(self) -> None:
        super().abandon()
        self._is_over()

    def keep_rows(self) -> None:
        """Copy what is not sent yet: from now on its arrays are the caller's own."""
        if not self.is_sent:
            self._prepared.keep_rows()

    def send_and_pull(self, out: ScatteredRows) -> tuple[Done, tuple[int, ...] | None]:
        """:meth:`send` a push of no group, and read its rows; see :meth:`RowCalls.write_and_pull`."""
        if self.is_sent or self.is_on_a_shard:
            return self.send(), None
        outcomes, writes = self._rows.write_and_pull(self._prepared, self._begin(), out)
        return self._end(outcomes), writes

    def to_begin(self) -> PreparedCall:
        """This write, not sent yet, for :meth:`RowCalls.begin`. It is given up where it fails."""
        failpoints.reach("client.send.before")
        context = CallContext()

        def send(future: RowFuture) -> bool:
            nonlocal context
            self.announce()
            context = self._numbers.context(self._sequence, self._table_incarnation)
            return self._rows.begin_write(self._prepared, context, future)

        def finish(reply: Any) -> Done:
            try:
                return self._end(self._rows.written(self._prepared, self._pending, context, reply))
            except BaseException:
                self.abandon()
                raise

        return PreparedCall(send, finish, self.abandon)

    def send_with(self, others: Sequence[RowWrite]) -> None:
        """:meth:`send` this one and others: what goes to a shard for the first time, in one request for all of them.

        Raises the first error once all were sent. Who sends them again reaches only the shards that have not answered.
        """
        writes = [write for write in (self, *others) if not write.is_sent]
        errors = []
        for rows in dict.fromkeys(write._rows for write in writes):
            together = [write for write in writes if write._rows is rows]
            replies = rows.write([(write._prepared, write._pending, write._begin()) for write in together])
            for write, outcomes in zip(together, replies, strict=True):
                try:
                    write._end(outcomes)
                except GeartrainError as exc:
                    errors.append(exc)
            del replies, outcomes  # see _end
        if errors:
            try:
                raise errors[0]
            finally:
                del errors
