"""Writes that are too large for one message: their parts are kept until all are there, then applied as one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.errors import InvalidArgument, MessageTooLarge
from geartrain.ams.messages import CallContext
from geartrain.ams.specs import Ids

MAX_PARTS = 65_536
Payload = tuple[Ids, npt.NDArray[Any]]


@dataclass
class _Pending:
    count: int
    touched: float
    parts: dict[int, Payload] = field(default_factory=dict)


class PartBuffer:
    """Parts of unfinished writes of one shard. Thread-safe.

    Memory is bounded by ``max_bytes``. A write whose sender went silent for ``patience_seconds`` is forgotten: nothing
    of it was applied, and a sender that comes back sends all parts again.
    """

    def __init__(
        self, max_bytes: int = 1 << 30, patience_seconds: float = 300.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes = max_bytes
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._pending: dict[tuple[str, int, int], _Pending] = {}
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, context: CallContext, index: int, count: int, payload: Payload) -> Payload | None:
        """Keep one part; return the whole write (ids [N], rows [N, D]) if it was the last one missing."""
        if not (1 <= count <= MAX_PARTS and 0 <= index < count):
            raise InvalidArgument(f"part {index} of {count} is not a part; count is 1 … {MAX_PARTS}, index below it")
        key = (context.stream, context.incarnation, context.sequence)
        with self._lock:
            self._forget_silent()
            self._forget_acknowledged(context)
            pending = self._pending.setdefault(key, _Pending(count, self._clock()))
            if pending.count != count:
                raise InvalidArgument(
                    f"part {index} of sequence {context.sequence} says there are {count} parts, another said "
                    f"{pending.count}"
                )
            pending.touched = self._clock()
            if index not in pending.parts:
                self._reserve(payload)
                pending.parts[index] = payload
            if len(pending.parts) < count:
                return None
            self._drop(key)
        parts = [pending.parts[i] for i in range(count)]
        return np.concatenate([ids for ids, _ in parts]), np.concatenate([rows for _, rows in parts])

    def _reserve(self, payload: Payload) -> None:
        size = _size(payload)
        if self._bytes + size > self._max_bytes:
            raise MessageTooLarge(
                f"unfinished writes would take {self._bytes + size} bytes; at most {self._max_bytes} are kept. "
                "Push fewer rows at once"
            )
        self._bytes += size

    def _forget_silent(self) -> None:
        oldest = self._clock() - self._patience_seconds
        for key in [key for key, pending in self._pending.items() if pending.touched < oldest]:
            self._drop(key)

    def _forget_acknowledged(self, context: CallContext) -> None:
        # A write that completed in the middle of its own retry leaves late parts behind.
        stale = [key for key in self._pending if key[0] == context.stream and key[2] < context.oldest_unacknowledged]
        for key in stale:
            self._drop(key)

    def _drop(self, key: tuple[str, int, int]) -> None:
        self._bytes -= sum(_size(payload) for payload in self._pending.pop(key).parts.values())


def _size(payload: Payload) -> int:
    return payload[0].nbytes + payload[1].nbytes
