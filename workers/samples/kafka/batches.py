"""Batches from the partitions of a Kafka topic, each of which is a data stream."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import confluent_kafka as kafka
import numpy as np

from geartrain.ams.observe.metrics import Metric, register_source
from geartrain.ams.values.errors import BrokerUnavailable, SourceDamaged, SourceError
from geartrain.ams.values.text import counted
from geartrain.workers.data.streams import Position
from geartrain.workers.samples.batches import SampleBatch
from geartrain.workers.samples.kafka.messages import MessageRows, MessageTables, place_of, position_of
from geartrain.workers.samples.kafka.topic import Topic
from geartrain.workers.samples.rows import tensors_of

logger = logging.getLogger(__name__)
_SLICE_SECONDS = 0.5
"""Longest call for a batch that returns none."""
_TAKE_SECONDS = 0.05
"""Time for the library to return the requested messages."""
_PROBE_SECONDS = 5.0
"""Time without a message after which the brokers are probed."""
_MAX_MESSAGES = 10_000
"""Most messages that the client library returns at once."""


class KafkaBatches:
    """Reads partitions as streams of one endless epoch, 0. Positions are those of :func:`position_of`."""

    def __init__(
        self,
        topic: Topic,
        tables: MessageTables,
        *,
        batch_size: int,
        max_wait_seconds: float | None,
        skip_damaged: bool,
        finish: Callable[[SampleBatch], SampleBatch],
        starts: Mapping[int, int],
        ends: Mapping[int, int] | None,
    ) -> None:
        """``starts`` are the first offsets of unread partitions, ``ends`` the offsets at which reading ends."""
        self._topic, self._tables = topic, tables
        self._batch_size, self._max_wait_seconds = batch_size, max_wait_seconds
        self._skip_damaged, self._finish = skip_damaged, finish
        self._starts, self._ends = starts, ends
        self._consumer = topic.consumer()
        self._positions: dict[int, Position] = {}
        self._next: dict[int, int] = {}
        """Next offset to fetch, beyond :attr:`_pending`."""
        self._pending: deque[MessageRows] = deque()
        self._pending_since = self._heard = time.monotonic()
        self._silent_since: float | None = None
        """Time at which the brokers were found to be away."""
        self._asks = threading.Lock()
        self._asker: Any = None
        """Client of its own for :meth:`metrics`: calls of the other one block until there are messages."""
        register_source(self)

    def metrics(self) -> Iterator[Metric]:
        """Yield the lag behind each partition's end, which is queried from the brokers."""
        positions = {partition: place_of(at.consumed)[0] for partition, at in self.positions.items()}
        with self._asks:
            if positions and self._asker is None:
                self._asker = self._topic.consumer()
            behind = self._topic.behind(self._asker, positions)
        samples = [((self._topic.name, partition), number) for partition, number in behind.items()]
        what = "Messages that the reader has not handed out yet."
        yield Metric("stream_lag_messages", "gauge", what, ("topic", "partition"), samples)

    @property
    def positions(self) -> dict[int, Position]:
        return dict(self._positions)

    @property
    def has_more(self) -> bool:
        return bool(self._pending) or any(self._is_open(partition) for partition in self._positions)

    def is_done(self, epoch: int, cursors: Callable[[], Mapping[int, tuple[int, int]]]) -> bool:
        """Return whether all partitions were committed up to their ends."""
        del epoch
        if self._ends is None or self.has_more:
            return False
        committed = cursors()
        return all(committed.get(at, (0, 0))[1] >= position_of(end) for at, end in self._ends.items())

    def _is_open(self, partition: int) -> bool:
        return self._ends is None or self._next[partition] < self._ends.get(partition, 0)

    def add(self, positions: Mapping[int, tuple[int, int]]) -> None:
        self.drop(positions)
        for partition, (_, position) in positions.items():
            at = position or position_of(self._starts[partition])
            self._positions[partition] = Position(0, at)
            self._next[partition] = place_of(at)[0]
        self._assign()

    def drop(self, streams: Iterable[int]) -> None:
        gone = set(streams) & set(self._positions)
        if gone:
            for partition in gone:
                del self._positions[partition], self._next[partition]
            self._pending = deque(rows for rows in self._pending if rows.partition not in gone)
            self._assign()

    def close(self) -> None:
        self._consumer.close()
        self._positions = {}
        with self._asks:
            if self._asker is not None:
                self._asker.close()
                self._asker = None

    def _assign(self) -> None:
        """Fetch the open partitions, each from the end of its pending messages."""
        wanted = [
            kafka.TopicPartition(self._topic.name, partition, offset)
            for partition, offset in self._next.items()
            if self._is_open(partition)
        ]
        if wanted:
            self._consumer.assign(wanted)
        else:
            self._consumer.unassign()

    def next_batch(self, epoch: int) -> SampleBatch | None:
        """Return the next batch; waits half a second at most.

        Raises BrokerUnavailable after the time-out, SourceDamaged for an unreadable message and for one that was
        deleted before it was read, ColumnMismatch.
        """
        del epoch
        try:
            return self._next_batch()
        except BaseException:
            self._assign()  # messages that the library has returned and that are not pending come again
            raise

    def _next_batch(self) -> SampleBatch | None:
        until = time.monotonic() + _SLICE_SECONDS
        while not self._is_full():
            left = until - time.monotonic()
            if left <= 0 or not self._receive(left):
                break
        if not self._is_full() and not self._is_due():
            return None
        return self._batch()

    def _num_pending(self) -> int:
        return sum(rows.size for rows in self._pending)

    def _is_full(self) -> bool:
        return self._num_pending() >= self._batch_size

    def _is_due(self) -> bool:
        """Return whether a partial batch is due: no more messages come, or its first sample has waited too long."""
        if not self._pending:
            return False
        waited = time.monotonic() - self._pending_since
        is_last = not any(self._is_open(partition) for partition in self._positions)
        return is_last or (self._max_wait_seconds is not None and waited >= self._max_wait_seconds)

    def _receive(self, seconds: float) -> bool:
        """Receive messages; return whether there may be more."""
        if not any(self._is_open(partition) for partition in self._positions):
            return False
        if not self._pending:
            self._pending_since = time.monotonic()
        elif self._max_wait_seconds is not None:
            seconds = min(seconds, max(0.0, self._pending_since + self._max_wait_seconds - time.monotonic()))
        missing = min(_MAX_MESSAGES, self._batch_size - self._num_pending())
        messages = self._consumer.consume(missing, timeout=min(seconds, _TAKE_SECONDS))
        ended = False
        for message in messages:
            ended |= self._take(message)
        if ended:
            self._assign()
        if any(message.error() is None for message in messages):
            self._mark_broker_alive()
        else:
            self._check_brokers()
        return not self._is_due()

    def _take(self, message: Any) -> bool:
        """Store a message; return whether it ends its partition."""
        partition, error = message.partition(), message.error()
        if error is not None:
            if error.code() == kafka.KafkaError._PARTITION_EOF:
                self._mark_broker_alive()
                return partition in self._positions and self._pass(partition, message.offset())
            if error.code() in (kafka.KafkaError._AUTO_OFFSET_RESET, kafka.KafkaError.OFFSET_OUT_OF_RANGE):
                raise self._deleted(partition)
            if not error.retriable() and error.fatal():
                raise BrokerUnavailable(f"topic {self._topic.name!r} ({self._topic.brokers}): {error.str()}")
            return False
        if partition not in self._positions or message.offset() < self._next[partition] or not self._is_open(partition):
            return False  # of an earlier assignment, or beyond the end
        offset = message.offset()
        if self._ends is None or offset < self._ends[partition]:
            goes_on_at, row = place_of(self._positions[partition].consumed)
            first = row if goes_on_at == offset else 0
            try:
                rows = self._tables.rows(partition, offset, message.value())
            except SourceError as damage:
                self._pass_over([damage])
            else:
                if rows.size > first:
                    self._pending.append(rows.split(first)[1] if first else rows)
        return self._pass(partition, offset + 1)

    def _pass(self, partition: int, offset: int) -> bool:
        """Skip all below ``offset``; return whether that ends the partition."""
        was_open = self._is_open(partition)
        self._next[partition] = max(self._next[partition], offset)
        if not any(rows.partition == partition for rows in self._pending):
            at = Position(0, max(self._positions[partition].consumed, position_of(self._next[partition])))
            self._positions[partition] = at
        return was_open and not self._is_open(partition)

    def _deleted(self, partition: int) -> SourceDamaged:
        low, high = self._topic.bounds(self._consumer, partition)
        return SourceDamaged(
            f"topic {self._topic.name!r}, partition {partition}: the message at offset {self._next[partition]} is not "
            f"there any more; the brokers have {low} to {high - 1}. They deleted it before it was read (retention), or "
            "the topic was made anew: begin with start='earliest', a job under another name"
        )

    def _mark_broker_alive(self) -> None:
        if self._silent_since is not None:
            logger.warning("brokers of topic %r answer again", self._topic.name)
        self._topic.hear()
        self._heard, self._silent_since = time.monotonic(), None

    def _check_brokers(self) -> None:
        """Probe the brokers after a while without a message. Raises BrokerUnavailable."""
        limit = self._topic.timeout_seconds
        if time.monotonic() - self._heard < min(_PROBE_SECONDS, limit / 4) and self._silent_since is None:
            return
        found = self._topic.partitions(self._consumer, min(1.0, limit / 4))
        if found is None:
            now = time.monotonic()
            if self._silent_since is None:
                self._silent_since = self._heard
            self._topic.warn()
            if now - self._silent_since > limit:
                self._silent_since, self._heard = None, now  # a retry waits again
                raise self._topic.unavailable(limit)
            return
        self._mark_broker_alive()
        if set(found) != set(self._starts):
            logger.warning(
                "topic %r has %s now, the job reads %d of them; give it another name to read all",
                self._topic.name,
                counted(len(found), "partition"),
                len(self._starts),
            )

    def _pass_over(self, damages: list[SourceError]) -> None:
        if not self._skip_damaged:
            raise damages[0]
        for damage in damages:
            logger.warning("skipping a damaged message: %s", damage)

    def _batch(self) -> SampleBatch | None:
        taken: list[MessageRows] = []
        rest = deque(self._pending)
        missing = self._batch_size
        while rest and missing:
            rows = rest.popleft()
            if rows.size > missing:
                rows, others = rows.split(missing)
                rest.appendleft(others)
            taken.append(rows)
            missing -= rows.size
        cursors = {rows.partition: Position(0, rows.position_after) for rows in taken}
        try:
            table = self._tables.table(taken)
        except SourceError:
            sound, damages = self._tables.sound(taken)
            self._pass_over(damages)
            table, taken = (self._tables.table(sound) if sound else None), sound
        self._pending, self._pending_since = rest, time.monotonic()
        waiting = {rows.partition for rows in rest}
        for partition in cursors.keys() - waiting:  # later messages without samples were skipped already
            cursors[partition] = Position(0, position_of(self._next[partition]))
        self._positions.update(cursors)
        if table is None:
            return None
        batch = SampleBatch(tensors_of(table), table.num_rows, cursors)
        batch.places = (
            np.repeat([rows.partition for rows in taken], [rows.size for rows in taken]),
            np.concatenate([position_of(rows.offset, rows.first) + np.arange(rows.size) for rows in taken]),
        )
        return self._finish(batch)
