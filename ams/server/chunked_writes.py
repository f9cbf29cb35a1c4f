"""Buffer of writes too large for one message: parts are held until all are there, then applied as one write."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.errors import Busy, InvalidArgument, MessageTooLarge
from geartrain.ams.values.shard_messages import CallContext, jobs_of

MAX_PARTS = 65_536
STREAM_SHARE = 8
"""Share (1/n) of all room for a stream that already has a write here."""
RETRY_AFTER_SECONDS = 0.2
_PART_BYTES = 1024
"""Approximate bytes of a part beside its data, so that empty parts are bounded, too."""
_GROWTH = 2
"""Factor of all room that parts of an admitted write may use if they are larger than its first one."""
Payload = tuple[npt.NDArray[Any], ...]
"""Arrays of N ids: the ids, their rows, and other values of each."""
_Key = tuple[str, int, int]
"""Stream, incarnation, sequence."""


@dataclass
class _Pending:
    count: int
    touched: float
    room: int = 0
    """Bytes reserved for it, with or without its parts."""
    size: int = 0
    """Bytes of the parts that are here."""
    parts: dict[int, Payload] = field(default_factory=dict)


class PartBuffer:
    """Parts of unfinished writes of one shard. Thread-safe.

    Room for a whole write is reserved with its first part, as if the others were as large. An admitted write can then
    be completed, unless its later parts are larger than its first and all writes would take more than twice
    ``max_bytes``: it is dropped (Busy). A write without room has nothing here (Busy: its sender retries all of it). A
    write whose sender was silent for ``patience_seconds``, or for ``crowded_seconds`` while another lacks room, is
    dropped: nothing of it was applied, and a sender that comes back sends all parts again.
    """

    def __init__(
        self,
        max_bytes: int = 1 << 30,
        patience_seconds: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
        crowded_seconds: float = 15.0,
    ) -> None:
        self._max_bytes = max_bytes
        self._patience_seconds = patience_seconds
        self._idle_seconds = crowded_seconds
        self._clock = clock
        self._pending: dict[_Key, _Pending] = {}
        self._bytes = 0
        """Sum of ``room``."""
        self._lock = threading.Lock()

    def add(self, context: CallContext, index: int, count: int, payload: Payload) -> Payload | None:
        """Hold one part; return the whole write, joined array by array, if it was the last one missing.

        Raises Busy if there is no room now, MessageTooLarge if there never is, InvalidArgument for an impossible part.
        """
        if not (1 <= count <= MAX_PARTS and 0 <= index < count):
            raise InvalidArgument(f"part {index} of {count} is not a part; count is 1 … {MAX_PARTS}, index below it")
        key = (context.stream, context.incarnation, context.sequence)
        with self._lock:
            self._forget_silent(self._patience_seconds)
            self._evict_stale(context)
            pending = self._pending.get(key) or self._admit(key, count, count * _size(payload))
            if pending.count != count:
                raise InvalidArgument(
                    f"part {index} of sequence {context.sequence} says there are {count} parts, another said "
                    f"{pending.count}"
                )
            if any(len(payload) != len(other) for other in pending.parts.values()):
                raise InvalidArgument(f"parts of sequence {context.sequence} are of different requests")
            pending.touched = self._clock()
            if index not in pending.parts:
                pending.parts[index] = payload
                pending.size += _size(payload)
                self._grow(key, pending)
            if len(pending.parts) < count:
                return None
            self._drop([key])
        return tuple(np.concatenate(arrays) for arrays in zip(*(pending.parts[i] for i in range(count)), strict=True))

    def fence(self, job: str, incarnation: int) -> None:
        """Drop the parts of streams of ``job`` with a lower incarnation: they may not write any more."""
        with self._lock:
            self._drop([key for key in self._pending if key[1] < incarnation and job in jobs_of(key[0])])

    def _admit(self, key: _Key, count: int, size: int) -> _Pending:
        """Reserve room for a new write."""
        if size > self._max_bytes:
            raise MessageTooLarge(
                f"a write in {count} parts would take {size} bytes; a shard keeps at most {self._max_bytes} of "
                "unfinished writes. Push fewer rows at once"
            )
        if not self._has_room(key[0], size):
            self._forget_silent(self._idle_seconds)
        if not self._has_room(key[0], size):
            raise Busy(
                f"unfinished writes hold {self._bytes} of {self._max_bytes} bytes, and a write in {count} parts needs "
                f"{size}; nothing of it was kept. Send all parts again",
                RETRY_AFTER_SECONDS,
            )
        pending = self._pending[key] = _Pending(count, self._clock(), size)
        self._bytes += size
        return pending

    def _has_room(self, stream: str, size: int) -> bool:
        of_stream = sum(pending.room for key, pending in self._pending.items() if key[0] == stream)
        is_fair = of_stream == 0 or of_stream + size <= self._max_bytes // STREAM_SHARE
        return is_fair and self._bytes + size <= self._max_bytes

    def _grow(self, key: _Key, pending: _Pending) -> None:
        """Reserve more room for a write whose parts are larger than its first one. Raises Busy, and drops the write, if
        there is none.
        """
        growth = pending.size - pending.room
        if growth <= 0:
            return
        if self._bytes + growth > _GROWTH * self._max_bytes:
            self._drop([key])
            raise Busy(
                f"unfinished writes hold {self._bytes} bytes, and {growth} more are needed for parts that are larger "
                "than the first of their write; nothing of it was kept. Send parts of about equal size",
                RETRY_AFTER_SECONDS,
            )
        pending.room += growth
        self._bytes += growth

    def _forget_silent(self, seconds: float) -> None:
        oldest = self._clock() - seconds
        self._drop([key for key, pending in self._pending.items() if pending.touched < oldest])

    def _evict_stale(self, context: CallContext) -> None:
        # If a write completes while its retry still arrives, the retry's remaining parts are stale. All parts of an
        # earlier process of the stream are stale, too.
        self._drop(
            [
                key
                for key in self._pending
                if key[0] == context.stream and (key[2] < context.oldest_unacknowledged or key[1] < context.incarnation)
            ]
        )

    def _drop(self, keys: Iterable[_Key]) -> None:
        for key in keys:
            self._bytes -= self._pending.pop(key).room


def _size(payload: Payload) -> int:
    return _PART_BYTES + sum(array.nbytes for array in payload)
