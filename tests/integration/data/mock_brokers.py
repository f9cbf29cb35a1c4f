"""A process with the mock cluster of librdkafka, so that its broker can be stopped and go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

import confluent_kafka as kafka

from tests.support.forkserver import FORKSERVER


def serve(told: Connection) -> None:
    producer = kafka.Producer({"test.mock.num.brokers": 1, "log_level": 0})
    (broker,) = producer.list_topics(timeout=20).brokers.values()
    told.send(f"{broker.host}:{broker.port}")
    told.recv()


@contextmanager
def mock_broker() -> Iterator[tuple[ForkServerProcess, str]]:
    """The process, and the address of its broker."""
    ours, theirs = FORKSERVER.Pipe()
    process = FORKSERVER.Process(target=serve, args=(theirs,))
    process.start()
    try:
        assert ours.poll(30)
        yield process, ours.recv()
    finally:
        process.kill()
        process.join()
