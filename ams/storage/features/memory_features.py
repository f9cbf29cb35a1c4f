"""Feature store in this process's memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from geartrain.ams.storage.features.byte_lru import ByteLru
from geartrain.ams.storage.features.store import (
    Counters,
    StoreCounts,
    checked_namespace,
    checked_read,
    checked_records,
)
from geartrain.ams.values.specs import Ids


class MemoryFeatures:
    """A :class:`FeatureStore` that ends with its process; exactly the least recently used records are evicted."""

    def __init__(self, namespace: str, *, max_bytes: int | None = None) -> None:
        self.namespace = checked_namespace(namespace)
        self._lru = ByteLru(max_bytes)
        self._values: list[bytes | None] = [None] * self._lru.capacity
        """By position."""
        self._lock = threading.Lock()
        self._counters = Counters()

    def read(self, ids: Ids) -> list[bytes | None]:
        ids = checked_read(ids)
        with self._lock:
            positions = self._lru.use(ids).tolist()
            values = [self._values[position] if position >= 0 else None for position in positions]
        self._counters.read(values)
        return values

    def write(self, ids: Ids, values: Sequence[bytes]) -> None:
        ids, kept = checked_records(checked_read(ids), values, self._lru.max_bytes)
        sizes = np.fromiter(map(len, kept), np.int64, len(kept))
        with self._lock:
            self._lru.reserve(len(ids))
            self._values += [None] * (self._lru.capacity - len(self._values))
            positions, _, freed = self._lru.insert(ids, sizes)
            for position, value in zip(positions.tolist(), kept, strict=True):
                self._values[position] = value
            for position in freed.tolist():
                self._values[position] = None
        self._counters.wrote(len(kept), len(freed))

    def remove(self, ids: Ids) -> None:
        ids = checked_read(ids)
        with self._lock:
            for position in self._lru.drop(ids)[1].tolist():
                self._values[position] = None

    def counts(self) -> StoreCounts:
        with self._lock:
            return self._counters.counts(len(self._lru), self._lru.total_bytes)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""
