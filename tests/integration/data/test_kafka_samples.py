"""Samples from Kafka, over the mock cluster of its client library: each message counts once, whoever goes away."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import numpy as np
import pytest

import geartrain as gt

pytest.importorskip("prometheus_client", reason="needs pip install 'geartrain[metrics]'")
kafka = pytest.importorskip("confluent_kafka", reason="needs pip install 'geartrain[kafka]'")
pa = pytest.importorskip("pyarrow", reason="needs pip install 'geartrain[kafka]'")

from mock_brokers import mock_broker  # noqa: E402

from geartrain.workers.samples.kafka.topic import Topic  # noqa: E402
from tests.support.refused_address import refused_address  # noqa: E402
from tests.support.scrapes import scrape  # noqa: E402

SCHEMA = {"id": "int64", "list": "list<int64>", "word": "string"}
QUICK = {"socket.timeout.ms": 500, "reconnect.backoff.max.ms": 200, "log_level": 0}


class Mock:
    """A cluster in this process, and what is written to it."""

    def __init__(self, partitions: int) -> None:
        """Samples go to so many of the four partitions that the library's topics have."""
        self.producer = kafka.Producer({"test.mock.num.brokers": 1, "log_level": 0, "linger.ms": 0})
        (broker,) = self.producer.list_topics(timeout=20).brokers.values()
        self.brokers = f"{broker.host}:{broker.port}"
        self.producer.list_topics("clicks", timeout=20)
        self.partitions = partitions

    def send(self, value: bytes | None, partition: int = 0) -> None:
        self.producer.produce("clicks", value=value, partition=partition)
        assert self.producer.flush(20) == 0

    def send_ids(self, ids: range) -> None:
        for id_ in ids:
            self.producer.produce("clicks", value=message(id_), partition=id_ % self.partitions)
        assert self.producer.flush(20) == 0

    def samples(self, **settings: Any) -> gt.KafkaSamples:
        given = {"schema": SCHEMA, "hash_strings": True, "settings": QUICK, "timeout_seconds": 20, **settings}
        return gt.KafkaSamples("clicks", self.brokers, **given)


def message(one: int) -> bytes:
    return json.dumps({"id": one, "list": list(range(one % 3)), "word": f"w{one}", "more": None}).encode()


@pytest.fixture
def mock() -> Iterator[Callable[[int], Mock]]:
    made: list[Mock] = []

    def make(partitions: int = 4) -> Mock:
        made.append(Mock(partitions))
        return made[-1]

    yield make
    for item in made:
        item.producer.purge()


def ids_of(batches: Any) -> list[int]:
    return [item for batch in batches for item in batch["id"].tolist()]


def test_messages_come_in_batches_of_one_size_up_to_now(mock: Callable[..., Mock]) -> None:
    broker = mock()
    broker.send_ids(range(1000))
    batches = list(broker.samples(batch_size=128, until="now"))
    assert [batch.num_samples for batch in batches] == [128] * 7 + [104]
    (shared,) = broker.samples(batch_size=1000, until="now", dedup=True)
    assert shared.nodes["list"].count == 3
    assert sorted(ids_of(batches)) == list(range(1000))
    first = batches[0]
    values, offsets = first["list"]
    assert (offsets.diff() == first["id"] % 3).all() and len(values) == offsets[-1]
    assert first["word"].tolist() == gt.hash_strings([f"w{item}" for item in first["id"].tolist()]).tolist()
    assert ids_of(broker.samples(batch_size=9, start={0: 248, 1: 275, 2: 275, 3: 275}, until="now")) == [992, 996]


def test_a_moment_is_the_first_offset_at_or_after_it() -> None:
    """The mock cluster knows no times: what a broker would answer is said here."""
    moment = datetime(2026, 1, 2, tzinfo=UTC)

    class Broker:
        def offsets_for_times(self, times: list[Any], timeout: float) -> list[Any]:
            assert 0 < timeout <= 7 and [time.offset for time in times] == [int(moment.timestamp() * 1000)] * 2
            return [kafka.TopicPartition("clicks", time.partition, -1 if time.partition else 5) for time in times]

    assert Topic("clicks", QUICK, 7).offsets_at(Broker(), [0, 1], moment) == {0: 5}


def test_a_message_of_many_samples_is_cut_between_batches_and_workers(mock: Callable[..., Mock]) -> None:
    broker = mock(2)
    for first in range(0, 600, 60):
        table = pa.table({"id": np.arange(first, first + 60, dtype=np.int32), "other": ["x"] * 60})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=25)
        broker.send(sink.getvalue().to_pybytes(), partition=first // 60 % 2)
    samples = broker.samples(schema={"id": "int64"}, hash_strings=False, format="arrow", batch_size=70, until="now")
    counts: Counter[int] = Counter()
    with gt.local() as cluster:
        for worker in ("a", "b"):
            with samples.shared(cluster, "job", worker=worker) as batches:
                for batch in islice(batches, 3):
                    batches.commit(batch)
                    counts.update(batch["id"].tolist())
                next(batches)  # and leaves without a commit of it
        with samples.shared(cluster, "job", worker="c") as batches:
            for batch in batches:
                batches.commit(batch)
                counts.update(batch["id"].tolist())
        assert counts == Counter(range(600))
        assert list(samples.shared(cluster, "job", worker="d")) == []


def test_a_broker_that_goes_away_is_waited_for_and_nothing_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    with mock_broker() as (process, brokers), gt.local() as cluster, gt.ops.serve_metrics("127.0.0.1:0") as port:
        producer = kafka.Producer({"bootstrap.servers": brokers, "log_level": 0})

        def send(ids: range) -> None:
            for id_ in ids:
                producer.produce("clicks", value=message(id_))
            assert producer.flush(20) == 0

        send(range(100))
        samples = gt.KafkaSamples(
            "clicks", brokers, schema={"id": "int64"}, batch_size=50, timeout_seconds=1, settings=QUICK
        )
        batches = samples.shared(cluster, "online", worker="a")
        read = [next(batches)]
        told = scrape(port.address)
        assert told.values("geartrain_stream_uncommitted_samples", job="online") == [50]
        assert sum(told.values("geartrain_stream_lag_messages", topic="clicks")) == 50
        read.append(next(batches))
        os.kill(process.pid or 0, signal.SIGSTOP)
        try:
            with (
                caplog.at_level(logging.WARNING, logger="geartrain"),
                pytest.raises(
                    gt.errors.BrokerUnavailable, match=r"no broker of topic 'clicks' \(127.* for 1 s: .*Nothing is lost"
                ),
            ):
                next(batches)
            assert "no broker of topic 'clicks'" in caplog.text and "waiting for up to 1 s" in caplog.text
            assert scrape(port.address).values("geartrain_stream_lag_messages") == []  # nobody knows
            for batch in read:
                batches.commit(batch)
        finally:
            os.kill(process.pid or 0, signal.SIGCONT)
        send(range(100, 200))
        read += list(islice(batches, 2))
        assert sorted(ids_of(read)) == list(range(200))
        batches.close()
        with samples.shared(cluster, "online", worker="b") as again:
            assert sorted(ids_of(islice(again, 2))) == list(range(100, 200))
            process.kill()
            process.join()
            with pytest.raises(gt.errors.BrokerUnavailable, match=r"s: 127\S+: [^;]* Connection refused\. Nothing"):
                next(again)
    with pytest.raises(gt.errors.BrokerUnavailable, match="answered for 1 s"):
        gt.KafkaSamples("clicks", brokers, schema={"id": "int64"}, batch_size=5, timeout_seconds=1, settings=QUICK)


def test_brokers_that_do_not_answer_are_named_with_their_reasons(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        refused_address() as refused,
        caplog.at_level(logging.DEBUG, logger="geartrain"),
        pytest.raises(gt.errors.BrokerUnavailable) as raised,
    ):
        gt.KafkaSamples("t", f"no..host,{refused}", schema={"id": "int64"}, batch_size=5, timeout_seconds=1)
    text = str(raised.value)
    assert f"(no..host,{refused}; port 9092 was taken for no..host, as none was given) answered for 1 s" in text
    assert re.search(rf"{refused}: Connect to \S+ failed: Connection refused[.;]", text)
    assert re.search(r"no\.\.host:9092: Failed to resolve 'no\.\.host:9092': \w+", text)
    loud = [record.getMessage() for record in caplog.records if record.levelno > logging.DEBUG]
    assert len(loud) == 1 and "no broker of topic 't'" in loud[0] and "Connection refused" in loud[0]
    assert any("FAIL" in record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("brokers", "bare"),
    [
        ("a:1,SSL://b:2,[::1]:3", None),
        ("a", "a"),
        ("a:1, ssl://b ,::1", "ssl://b, ::1"),
    ],
)
def test_brokers_without_a_port_are_said(brokers: str, bare: str | None) -> None:
    text = str(Topic("t", {"bootstrap.servers": brokers}, 1).unavailable(1))
    assert (f"port 9092 was taken for {bare}, as none" in text) if bare else ("9092" not in text)


def test_latest_is_where_the_job_began_and_stays_there(mock: Callable[..., Mock]) -> None:
    broker = mock(2)
    broker.send_ids(range(100))
    with gt.local() as cluster:
        first = broker.samples(batch_size=5, start="latest").shared(cluster, "job", worker="a", incarnation=1)
        first._prepared()  # then it dies
        broker.partitions = 4
        broker.send_ids(range(100, 110))
        samples = broker.samples(batch_size=5, start="latest", until="now")
        with samples.shared(cluster, "job", worker="a", incarnation=2) as batches:
            assert sorted(ids_of(committing(batches))) == list(range(100, 110))


def committing(batches: Any) -> Iterator[Any]:
    for batch in batches:
        yield batch
        batches.commit(batch)


def test_a_small_batch_is_given_when_it_has_waited(mock: Callable[..., Mock]) -> None:
    broker = mock(1)
    broker.send_ids(range(7))
    following = iter(broker.samples(batch_size=5, max_wait_seconds=0.05))
    assert [len(ids_of([next(following)])) for _ in range(2)] == [5, 2]
    broker.send_ids(range(7, 9))
    assert ids_of([next(following)]) == [7, 8]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b'{"id": "x", "list": [], "word": ""}', "offset 3: the message cannot be read"),
        (b"{no json", "offset 3: the message cannot be read"),
        (b'{"id": 1, "word": ""}{"id": 2, "word": ""}', "offset 3: .*1 messages hold 2 objects"),
        (b'{"list": [], "word": ""}', "offset 3: column 'id' has no value"),
        (None, "offset 3: the message cannot be read: it has no value"),
    ],
)
def test_a_message_that_cannot_be_read_is_named_or_passed_over(
    mock: Callable[..., Mock], value: bytes | None, words: str
) -> None:
    broker = mock(1)
    broker.send_ids(range(3))
    broker.send(value)
    broker.send_ids(range(4, 6))
    with gt.local() as cluster:
        batches = broker.samples(batch_size=10, until="now").shared(cluster, "job", worker="a")
        for _ in range(2):
            with pytest.raises(gt.errors.SourceDamaged, match=f"topic 'clicks', partition 0, {words}"):
                list(batches)
    assert ids_of(broker.samples(batch_size=10, until="now", skip_damaged=True)) == [0, 1, 2, 4, 5]


def test_a_list_of_another_length_is_named(mock: Callable[..., Mock]) -> None:
    broker = mock(1)
    broker.send(b'{"pair": [1, 2]}')
    broker.send(b'{"pair": [1, 2, 3]}')
    settings: dict[str, Any] = {"schema": {"pair": "int64[2]"}, "hash_strings": False, "until": "now"}
    with pytest.raises(gt.errors.SourceDamaged, match=r"offset 1: column 'pair' has 3 values; it must be int64\[2\]"):
        list(broker.samples(batch_size=2, **settings))
    assert next(iter(broker.samples(batch_size=1, **settings)))["pair"].tolist() == [[1, 2]]


@pytest.mark.parametrize("batch_size", [3, 10])
def test_a_job_ends_though_its_last_messages_are_no_samples(mock: Callable[..., Mock], batch_size: int) -> None:
    broker = mock(1)
    broker.send_ids(range(3))
    broker.send(None)
    samples = broker.samples(batch_size=batch_size, until="now", skip_damaged=True)
    with gt.local() as cluster, samples.shared(cluster, "job", worker="a") as batches:
        ids = []
        overdue = threading.Timer(20, batches.interrupt)
        overdue.start()
        for batch in batches:
            ids += batch["id"].tolist()
            batches.commit(batch)
        assert overdue.is_alive()  # nobody had to end it
        overdue.cancel()
        overdue.join()
    assert ids == [0, 1, 2]


def test_what_cannot_be_is_refused(mock: Callable[..., Mock]) -> None:
    broker = mock(2)
    with pytest.raises(gt.errors.SourceNotFound, match=r"no topic 'click' .*did you mean 'clicks'\?"):
        gt.KafkaSamples(
            "click",
            broker.brokers,
            schema={"id": "int64"},
            batch_size=5,
            settings={**QUICK, "allow.auto.create.topics": False},
        )
    with pytest.raises(gt.errors.InvalidArgument, match="type of column 'id' is 'int'"):
        broker.samples(schema={"id": "int"}, batch_size=5)
    with pytest.raises(gt.errors.InvalidArgument, match="start names partition 7"):
        broker.samples(start={7: 0}, batch_size=5)
    broker.send_ids(range(4))
    with pytest.raises(
        gt.errors.SourceDamaged, match="message at offset 9 is not there any more; the brokers have 0 to 1"
    ):
        next(iter(broker.samples(start={0: 9}, batch_size=5)))


def test_impressions_wait_for_their_clicks_and_come_once_whoever_reads_them(mock: Callable[..., Mock]) -> None:
    broker = mock(2)

    def send(id_: int, time: int, click: int) -> None:
        sample = {"impression": id_, "time": time, "click": click, **({} if click else {"user": id_ * 10})}
        broker.producer.produce("clicks", value=json.dumps(sample).encode(), partition=id_ % 2)

    for id_ in range(200):
        send(id_, id_, 0)
        if id_ >= 20:
            if id_ % 5 == 0:
                send(id_ - 10, id_, 1)  # in time
            elif id_ % 5 == 1:
                send(id_ - 20, id_, 1)  # too late
    assert broker.producer.flush(20) == 0
    samples = broker.samples(
        schema={"impression": "int64", "time": "float64", "click": "float32", "user": "int64"},
        fill={"user": -1},
        hash_strings=False,
        batch_size=16,
        until="now",
        late_labels=gt.LateLabels(window_seconds=15),
    )
    found: list[tuple[int, float]] = []
    with gt.local() as cluster:
        for worker in "abcdefghij":
            with samples.shared(cluster, "job", worker=worker) as batches:
                for done, batch in enumerate(batches):
                    if done == 2:
                        break  # without a commit
                    batches.commit(batch)
                    assert (batch["user"] == batch["impression"] * 10).all()
                    found += zip(batch["impression"].tolist(), batch["click"].tolist(), strict=True)
    clicked = {id_ - 10 for id_ in range(20, 200, 5)}
    assert sorted(found) == [(id_, float(id_ in clicked)) for id_ in range(200)]


def test_a_message_with_a_time_that_is_no_number_is_named_or_passed_over(mock: Callable[..., Mock]) -> None:
    broker = mock(1)
    for times in ([0.0, 1.0], [2.0, float("nan")], [3.0, 40.0]):
        table = pa.table({"impression": [int(times[0]), int(times[0]) + 10], "time": times, "click": [0.0, 0.0]})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        broker.send(sink.getvalue().to_pybytes())
    settings: dict[str, Any] = {
        "schema": {"impression": "int64", "time": "float64", "click": "float32"},
        "format": "arrow",
        "hash_strings": False,
        "batch_size": 10,
        "until": "now",
        "late_labels": gt.LateLabels(window_seconds=5),
    }
    with gt.local() as cluster:
        named = r"partition 0, offset 1, row 1: 'time' is nan"
        with broker.samples(**settings).shared(cluster, "named", worker="a") as batches:
            for _ in range(2):
                with pytest.raises(gt.errors.SourceDamaged, match=named):
                    next(batches)
        found: list[int] = []
        with broker.samples(**settings, skip_damaged=True).shared(cluster, "passed", worker="a") as batches:
            for batch in batches:
                batches.commit(batch)
                found += batch["impression"].tolist()
    assert sorted(found) == [0, 3, 10, 13]
