"""Queries about a topic to its brokers, with retries and warnings while they do not answer."""

from __future__ import annotations

import difflib
import logging
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any, TypeVar

import confluent_kafka as kafka

from geartrain.ams.values.errors import BrokerUnavailable, SourceNotFound

logger = logging.getLogger(__name__)
Answer = TypeVar("Answer")
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 2.0, 10.0
"""Time-out of the first query, and the longest one; each is twice as long as the one before."""
_WARNING_SECONDS = 10.0
"""Time between two warnings that no broker answers."""
_BEHIND_SECONDS = 1.0
"""Time-out of the query for a partition's end, for the lag."""
_MAX_REASONS = 3
"""Most brokers whose errors a message names."""
_BROKER = re.compile(r"^(?:GroupCoordinator: )?(\S+?)(?:/(?:bootstrap|-?\d+))?: ")
"""Prefix of the client library's error about a broker: its address, under either of two names."""
_STATE = re.compile(r" \(after \d+ms in state .*\)$")


class _ClientLog:
    """Logger of the client library. It repeats a broker's failure several times a second, so these are debug lines."""

    @staticmethod
    def log(level: int, text: str, *arguments: Any) -> None:
        del level
        logger.debug(text, *arguments)


class Topic:
    """A topic with its brokers, queried with a time-out."""

    def __init__(self, name: str, settings: Mapping[str, Any], timeout_seconds: float) -> None:
        self.name, self.timeout_seconds = name, timeout_seconds
        self.settings = {
            "group.id": "geartrain",  # the library requires one; nothing is committed to it
            **settings,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "error_cb": self._record,
            "logger": _ClientLog(),
        }
        self.brokers = str(settings.get("bootstrap.servers", "no brokers"))
        self._reasons: dict[str, str] = {}
        """Last error of each broker, latest last."""
        self._warned: float | None = None

    def consumer(self) -> Any:
        """Return a new client."""
        return kafka.Consumer(self.settings)

    def partitions(self, consumer: Any, timeout_seconds: float) -> list[int] | None:
        """Return the partition numbers; None: no answer. Raises SourceNotFound."""
        try:
            return self._partitions(consumer, timeout_seconds)
        except kafka.KafkaException:
            return None

    def _partitions(self, consumer: Any, seconds: float) -> list[int]:
        found = consumer.list_topics(self.name, timeout=seconds).topics[self.name]
        if found.error is None:
            return sorted(found.partitions)
        near = difflib.get_close_matches(self.name, list(consumer.list_topics(timeout=seconds).topics), 3)
        meant = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise SourceNotFound(f"{self.brokers} have no topic {self.name!r} ({found.error.str()}){meant}")

    def first_partitions(self, consumer: Any) -> list[int]:
        """Return the partition numbers, with retries. Raises BrokerUnavailable after the time-out, SourceNotFound."""
        return self._answer(consumer, lambda seconds: self._partitions(consumer, seconds))

    def offsets_at(self, consumer: Any, partitions: list[int], moment: datetime) -> dict[int, int]:
        """Return, for each partition that has one, the first offset at or after ``moment``. Raises
        BrokerUnavailable."""
        milliseconds = int(moment.timestamp() * 1000)
        asked = [kafka.TopicPartition(self.name, partition, milliseconds) for partition in partitions]
        found = self._answer(consumer, lambda seconds: consumer.offsets_for_times(asked, timeout=seconds))
        return {entry.partition: entry.offset for entry in found if entry.offset >= 0}

    def bounds(self, consumer: Any, partition: int) -> tuple[int, int]:
        """Return the first existing offset, and the next one to be written. Raises BrokerUnavailable."""
        asked = kafka.TopicPartition(self.name, partition)
        low, high = self._answer(consumer, lambda seconds: consumer.get_watermark_offsets(asked, timeout=seconds))
        return int(low), int(high)

    def behind(self, consumer: Any, positions: Mapping[int, int]) -> dict[int, int]:
        """Return the number of messages after each position, where brokers answer promptly."""
        found: dict[int, int] = {}
        with suppress(kafka.KafkaException):
            for partition, position in positions.items():
                asked = kafka.TopicPartition(self.name, partition)
                _, high = consumer.get_watermark_offsets(asked, timeout=_BEHIND_SECONDS)
                found[partition] = max(0, high - position)
        return found

    def _answer(self, consumer: Any, ask: Callable[[float], Answer]) -> Answer:
        """Return the result of ``ask(seconds)``, retried until the time-out, with a warning now and then.

        It polls ``consumer``, which would lose a message: nothing may be assigned to it, unless it is assigned anew
        later.
        """
        until = time.monotonic() + self.timeout_seconds
        wait = min(_FIRST_WAIT_SECONDS, self.timeout_seconds / 4)
        while True:
            try:
                answer = ask(min(wait, max(0.01, until - time.monotonic())))
            except kafka.KafkaException as exc:
                consumer.poll(0.1)  # only then does the library report errors
                if not self._reasons:
                    self._record(exc.args[0])
                if time.monotonic() >= until:
                    raise self.unavailable(self.timeout_seconds) from exc
                self.warn()
                wait = min(2 * wait, _LONGEST_WAIT_SECONDS)
            else:
                self.hear()
                return answer

    def hear(self) -> None:
        """Record an answer of a broker: earlier errors are over."""
        self._reasons.clear()
        self._warned = None

    def warn(self) -> None:
        """Log that no broker answers, unless that was logged just now."""
        now = time.monotonic()
        if self._warned is None or now - self._warned >= _WARNING_SECONDS:
            self._warned = now
            logger.warning(
                "no broker of topic %r (%s) answers: %s; waiting for up to %g s",
                self.name,
                self._addresses(),
                self._why(),
                self.timeout_seconds,
            )

    def unavailable(self, seconds: float) -> BrokerUnavailable:
        """Return the error after this wait."""
        return BrokerUnavailable(
            f"no broker of topic {self.name!r} ({self._addresses()}) answered for {seconds:g} s: {self._why()}. "
            "Nothing is lost; reading goes on where it was once they are back"
        )

    def _record(self, error: Any) -> None:
        if error.code() == kafka.KafkaError._ALL_BROKERS_DOWN:
            return  # has the number, not the reason
        reason = _STATE.sub("", _BROKER.sub(r"\1: ", str(error.str())))
        broker = reason.partition(": ")[0]
        self._reasons.pop(broker, None)
        self._reasons[broker] = reason

    def _why(self) -> str:
        return "; ".join(list(self._reasons.values())[-_MAX_REASONS:]) or "no answer"

    def _addresses(self) -> str:
        bare = [entry for entry in map(str.strip, self.brokers.split(",")) if entry and not _has_port(entry)]
        taken = f"; port 9092 was taken for {', '.join(bare)}, as none was given" if bare else ""
        return self.brokers + taken


def _has_port(broker: str) -> bool:
    """Return whether the client library finds a port: after the only colon, or after an IPv6 address's bracket."""
    address = broker.rpartition("://")[2]
    return address.count(":") == 1 or "]:" in address
