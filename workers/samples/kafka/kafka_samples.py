"""Samples in the messages of a Kafka topic, as a user creates them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

from geartrain.ams.values.arguments import boolean, integer, real_number
from geartrain.ams.values.errors import ConfigError, InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.workers.samples.source import fingerprint

if TYPE_CHECKING:
    from geartrain.ams.client.cluster import Cluster
    from geartrain.ams.values.scheduler_messages import RestoreOrder
    from geartrain.workers.samples.batches import SampleBatch
    from geartrain.workers.samples.late_labels import LateLabels
    from geartrain.workers.samples.leased import LeasedSamples
    from geartrain.workers.samples.reader import StreamBatches


class KafkaSamples:
    """Samples from a Kafka topic, in batches, as they arrive.

        schema = {"user": "int64", "history": "list<int64>", "click": "float32"}
        samples = gt.KafkaSamples("clicks", "broker:9092", schema=schema, batch_size=4096)
        with samples.shared(cluster, "ctr-online", worker="worker-3") as batches:
            for batch in batches:            # without end, or to ``until``
                ...
                batches.commit(batch)

    Each partition is a data stream of the job: its offsets are committed with the job's cursors, at the scheduler;
    Kafka's consumer groups are not used. A message is a JSON object, or an Arrow IPC stream of many samples.
    """

    def __init__(
        self,
        topic: str,
        brokers: str,
        *,
        schema: Mapping[str, str],
        batch_size: int,
        format: Literal["json", "arrow"] = "json",
        hash_strings: bool | Sequence[str] | Mapping[str, int] = False,
        fill: Mapping[str, float | str] | None = None,
        fold: Sequence[str] = (),
        start: Literal["earliest", "latest"] | Mapping[int, int] = "earliest",
        until: Literal["now"] | datetime | Mapping[int, int] | None = None,
        max_wait_seconds: float | None = None,
        skip_damaged: bool = False,
        dedup: bool | Mapping[str, Sequence[str]] = False,
        late_labels: LateLabels | None = None,
        timeout_seconds: float = 60.0,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Query the topic's partitions from the brokers.

        Args:
            topic: Its name.
            brokers: ``host:port``, or several separated by commas; the default port is 9092.
            schema: Columns and their types: "int64", "float32", "float64", "bool", "string", "list<int64>", "int64[8]".
            batch_size: B. The last batch before ``until`` may be smaller.
            format: Format of the messages.
            hash_strings: Columns of strings, or of lists of them, to hash to ids with ``gt.hash_strings``; True: all. A
                mapping gives each its seed.
            fill: Replacement of missing values, by column. A missing list is empty; without ``fill``, a missing text is
                empty, and another missing value an error.
            fold: Columns of any 64-bit integers, or of lists of them, to map to ids with ``gt.fold_ids``.
            start: Start of partitions that the job has not read; a mapping gives the offset of each.
            until: End of reading: at the present end, before the first message of a time, or before the offset of each
                partition, such as :attr:`ends` of another worker; None: endless.
            max_wait_seconds: Longest wait of a sample before a partial batch is returned; None: wait until it is full.
            skip_damaged: Log unreadable messages and continue; otherwise they are an error.
            dedup: Levels and their columns, as of :class:`gt.ParquetSamples`.
            late_labels: Messages are impressions and their clicks, in one partition (:class:`gt.LateLabels`).
            timeout_seconds: Wait for brokers that do not answer.
            settings: Of librdkafka, such as for security: ``{"security.protocol": "SSL"}``.

        Raises:
            ConfigError: confluent-kafka or pyarrow is missing.
            InvalidArgument: An argument is out of range.
            SourceNotFound: The brokers have no such topic.
            BrokerUnavailable: They do not answer.
        """
        _require_libraries()
        from geartrain.workers.samples.dedup import finisher
        from geartrain.workers.samples.kafka.messages import FORMATS, MessageTables, plan_of
        from geartrain.workers.samples.kafka.topic import Topic

        for what, text in (("topic", topic), ("brokers", brokers)):
            if not isinstance(text, str) or not text:
                raise InvalidArgument(f"{what} is {quoted(text)}; it must be a text")
        if format not in FORMATS:
            raise InvalidArgument(f"format is {quoted(format)}; it must be one of {', '.join(FORMATS)}")
        if not (start in ("earliest", "latest") or isinstance(start, Mapping)):
            raise InvalidArgument(f"start is {quoted(start)}; it must be 'earliest', 'latest' or offsets by partition")
        if not (until in (None, "now") or isinstance(until, datetime | Mapping)):
            raise InvalidArgument(
                f"until is {quoted(until)}; it must be 'now', a datetime, offsets by partition, or None"
            )
        plan = plan_of(schema, hash_strings, fill or {}, f"topic {topic!r}", fold)
        self.tables = MessageTables(topic, plan, FORMATS[format](plan))
        self._batch_size = integer("batch_size", batch_size, 1)
        self._max_wait_seconds = None if max_wait_seconds is None else real_number("max_wait_seconds", max_wait_seconds)
        self._skip_damaged = boolean("skip_damaged", skip_damaged)
        self._finish, self._late_labels = finisher(dedup), late_labels
        self.tables.time = None if late_labels is None else late_labels.time
        timeout = real_number("timeout_seconds", timeout_seconds)
        if not timeout > 0:
            raise InvalidArgument(f"timeout_seconds is {timeout_seconds}; it must be above 0")
        self._topic = Topic(topic, {**(settings or {}), "bootstrap.servers": brokers}, timeout)
        self.identity = fingerprint("kafka", topic, format)
        consumer = self._topic.consumer()
        try:
            partitions = self._topic.first_partitions(consumer)
            bounds = {partition: self._topic.bounds(consumer, partition) for partition in partitions}
            self._starts = self._places_of(start, bounds)
            self.ends = None if until is None else self._ends_of(consumer, until, bounds)
        finally:
            consumer.close()

    @staticmethod
    def _places_of(start: Any, bounds: Mapping[int, tuple[int, int]]) -> dict[int, int]:
        if isinstance(start, Mapping):
            unknown = sorted(set(start) - set(bounds), key=str)
            if unknown:
                raise InvalidArgument(f"start names partition {unknown[0]!r}; there are 0 to {len(bounds) - 1}")
            said = {at: integer(f"start of partition {at}", offset, 0) for at, offset in start.items()}
            return {at: said.get(at, low) for at, (low, _) in bounds.items()}
        return {at: low if start == "earliest" else high for at, (low, high) in bounds.items()}

    def _ends_of(self, consumer: Any, until: Any, bounds: Mapping[int, tuple[int, int]]) -> dict[int, int]:
        ends = {partition: high for partition, (_, high) in bounds.items()}
        if isinstance(until, Mapping):
            return {at: integer(f"until of partition {at}", until.get(at, high), 0) for at, high in ends.items()}
        if isinstance(until, datetime):
            ends.update(self._topic.offsets_at(consumer, list(bounds), until))
        return ends

    @property
    def num_partitions(self) -> int:
        """Number of the topic's partitions: the most workers with something to read."""
        return len(self._starts)

    def __iter__(self) -> Iterator[SampleBatch]:
        """Read all partitions from ``start`` on, in this process alone; every loop starts there.

        Raises SourceError, BrokerUnavailable.
        """
        return _Batches(self.reader())

    def shared(
        self,
        cluster: Cluster,
        job: str,
        *,
        worker: str,
        num_workers: int = 1,
        incarnation: int | None = None,
        restore: RestoreOrder | None = None,
    ) -> LeasedSamples:
        """Read some of the partitions, beside other workers of a job; every message is committed exactly once.

        Args:
            cluster: Its scheduler stores the offsets.
            job: Name of the job. A new name starts at ``start``.
            worker: Name of this worker, unique in the job.
            num_workers: Expected workers: partitions are reserved for them for one lease after the first.
            incarnation: As in ``Cluster.streams``.
            restore: The scheduler saves the job and restores it after a loss: train with
                :meth:`.LeasedSamples.apply`.

        Raises InvalidArgument, also for a job that was begun with another number of partitions.
        """
        from geartrain.workers.samples.leased import LeasedSamples

        streams = cluster.streams(
            job,
            worker=worker,
            num_streams=self.num_partitions,
            num_workers=num_workers,
            incarnation=incarnation,
            data=self.identity,
            restore=restore,
        )
        return LeasedSamples(self.unassigned(), streams)

    def reader(self) -> StreamBatches:
        """Return a reader of all partitions, from ``start`` on."""
        reader = self.unassigned()
        reader.add(dict.fromkeys(self._starts, (0, 0)))
        return reader

    def unassigned(self) -> StreamBatches:
        """A reader that has no partitions yet."""
        from geartrain.workers.samples.kafka.batches import KafkaBatches
        from geartrain.workers.samples.late_labels import LabelledBatches

        labels = self._late_labels
        reader = KafkaBatches(
            self._topic,
            self.tables,
            batch_size=self._batch_size,
            max_wait_seconds=self._max_wait_seconds,
            skip_damaged=self._skip_damaged,
            finish=self._finish if labels is None else lambda batch: batch,
            starts=self._starts,
            ends=self.ends,
        )
        if labels is None:
            return reader
        return LabelledBatches(reader, labels, batch_size=self._batch_size, finish=self._finish)


class _Batches(Iterator["SampleBatch"]):
    """Batches of a reader, until it has no more."""

    def __init__(self, reader: StreamBatches) -> None:
        self._reader = reader
        self._is_ended = False

    def __next__(self) -> SampleBatch:
        while not self._is_ended and self._reader.has_more:
            if (batch := self._reader.next_batch(0)) is not None:
                return batch
        self.close()
        raise StopIteration

    def interrupt(self) -> None:
        """End the iteration, from any thread."""
        self._is_ended = True

    def close(self) -> None:
        """Close the consumer. Idempotent."""
        self._is_ended = True
        self._reader.close()


def _require_libraries() -> None:
    try:
        for library in ("confluent_kafka", "pyarrow"):
            importlib.import_module(library)
    except ImportError as exc:
        raise ConfigError(
            f"samples from Kafka need confluent-kafka and pyarrow, and one cannot be imported: {exc}; "
            "pip install 'geartrain[kafka]'"
        ) from exc
