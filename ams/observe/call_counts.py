"""Counters of the calls that a process answers: number, errors, seconds and bytes."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from geartrain.ams.kernels._core import CALL_SECONDS_BOUNDS
from geartrain.ams.observe.metrics import Buckets, Metric

WELL = "OK"
"""Code of a successful call; that of another is the name of its error."""

ENDED_EARLY = "Unknown"
"""Code of a call that was cancelled, or ended by a defect."""


class Counted(NamedTuple):
    """Counters of one RPC by one carrier; the compiled part counts frames in this order too."""

    carrier: str
    op: str
    by_seconds: list[int]
    """Calls that took up to each of CALL_SECONDS_BOUNDS, and those that took longer than all."""
    seconds: float
    bytes_in: int
    bytes_out: int
    faults: dict[str, int]
    """Failed calls by code."""


class CallCounts:
    """Counters of calls over gRPC. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[str, Counted] = {}

    def add(self, op: str, code: str, seconds: float, bytes_in: int, bytes_out: int) -> None:
        """Count a call that has ended."""
        with self._lock:
            old = self._of.get(op) or Counted("grpc", op, [0] * (len(CALL_SECONDS_BOUNDS) + 1), 0.0, 0, 0, {})
            old.by_seconds[bisect.bisect_left(CALL_SECONDS_BOUNDS, seconds)] += 1
            if code != WELL:
                old.faults[code] = old.faults.get(code, 0) + 1
            self._of[op] = old._replace(
                seconds=old.seconds + seconds, bytes_in=old.bytes_in + bytes_in, bytes_out=old.bytes_out + bytes_out
            )

    def read(self) -> list[Counted]:
        """Return the counters so far."""
        with self._lock:
            return [of._replace(by_seconds=[*of.by_seconds], faults={**of.faults}) for of in self._of.values()]


def call_metrics(counted: Iterable[tuple[Sequence[object], Counted]], labels: Sequence[str] = ()) -> Iterator[Metric]:
    """Yield the metrics of calls, each with the values of ``labels``."""
    counted = list(counted)
    yield Metric(
        "calls_total",
        "counter",
        f"Calls that were answered, by how they ended: {WELL}, or the name of the error.",
        (*labels, "op", "carrier", "code"),
        [
            ((*values, of.op, of.carrier, code), number)
            for values, of in counted
            for code, number in {WELL: sum(of.by_seconds) - sum(of.faults.values()), **of.faults}.items()
        ],
    )
    yield Metric(
        "call_seconds",
        "histogram",
        "Seconds from the arrival of a whole call until its answer.",
        (*labels, "op", "carrier"),
        [((*v, of.op, of.carrier), Buckets(CALL_SECONDS_BOUNDS, of.by_seconds, of.seconds)) for v, of in counted],
    )
    yield Metric(
        "call_bytes_total",
        "counter",
        "Bytes of requests (in) and replies (out), without those of HTTP, TCP and TLS.",
        (*labels, "op", "carrier", "direction"),
        [
            ((*values, of.op, of.carrier, direction), number)
            for values, of in counted
            for direction, number in (("in", of.bytes_in), ("out", of.bytes_out))
        ],
    )
