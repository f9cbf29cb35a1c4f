"""Protocol of a feature store: records of bytes by id that may be evicted, each with a checksum.

Dense features, raw samples: whatever can be made again. So a store may drop records to stay small, and a record that
is damaged, or another's, is a miss that is counted, never an answer. What must not be lost belongs into a
:class:`geartrain.ams.storage.kv.store.KeyValueStore`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import xxhash

from geartrain.ams.kernels.ops import checked_ids, splitmix64
from geartrain.ams.values.errors import InvalidArgument, InvalidIds
from geartrain.ams.values.specs import Ids

SEAL_BYTES = 8
DEFAULT_RECORD_SECONDS = 86_400.0
_NAMESPACE_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-/")
_MAX_NAMESPACE = 100


@dataclass(frozen=True)
class StoreCounts:
    """Counts of a store since this process opened it."""

    hits: int = 0
    misses: int = 0
    """Reads of ids that had no record, or a damaged one."""
    damaged: int = 0
    """Misses whose record was changed, cut or another's."""
    written: int = 0
    evicted: int = 0
    """Records dropped to stay within ``max_bytes``."""
    records: int | None = None
    """Records in the store; None: it is shared and does not count them."""
    stored_bytes: int | None = None
    """Bytes of sealed values, without keys and pages; None: as ``records``."""


class FeatureStore(Protocol):
    """Records under a namespace and int64 ids. Thread-safe."""

    namespace: str

    def read(self, ids: Ids) -> list[bytes | None]:
        """Return the record of each id [N], None for a missing or damaged one. Ids may repeat. It counts as a use.

        Raises InvalidIds, StoreUnavailable.
        """

    def write(self, ids: Ids, values: Sequence[bytes]) -> None:
        """Write these records over older ones; the last of a repeated id counts. Others may be evicted.

        Raises InvalidIds, InvalidArgument (a record above ``max_bytes``), StoreUnavailable, StateFailed.
        """

    def remove(self, ids: Ids) -> None:
        """Remove these records. Raises InvalidIds, StoreUnavailable, StateFailed."""

    def counts(self) -> StoreCounts:
        """Return the counts so far."""

    def close(self) -> None:
        """Close the store. Idempotent."""


def checked_namespace(namespace: str) -> str:
    """Return it if it is legal, else raise InvalidArgument."""
    if not 1 <= len(namespace) <= _MAX_NAMESPACE or not _NAMESPACE_CHARACTERS.issuperset(namespace):
        raise InvalidArgument(
            f"namespace is {namespace!r}; it must be 1 to {_MAX_NAMESPACE} letters, digits and ._-/ characters"
        )
    return namespace


def checked_records(ids: Ids, values: Sequence[bytes], max_record: int | None = None) -> tuple[Ids, list[bytes]]:
    """Return ids and values without the earlier ones of repeated ids. Raises InvalidIds, InvalidArgument."""
    ids = checked_ids(ids)
    if len(values) != len(ids):
        raise InvalidArgument(f"{len(values)} values were given for {len(ids)} ids; each id needs one")
    for row_id, value in zip(ids, values, strict=True):
        if not isinstance(value, bytes):
            raise InvalidArgument(f"the value of id {row_id} is {type(value).__name__}; it must be bytes")
        if max_record is not None and len(value) > max_record:
            raise InvalidArgument(
                f"the value of id {row_id} has {len(value)} bytes; at most {max_record} fit: raise max_bytes"
            )
    last = dict(zip(ids.tolist(), values, strict=True))
    if len(last) == len(ids):
        return ids, list(values)
    return np.fromiter(last, np.int64, len(last)), list(last.values())


class Seals:
    """XXH3 of a record under a seed made of namespace and id: one that was changed, cut or moved is found."""

    def __init__(self, namespace: str) -> None:
        self._of_namespace = np.uint64(xxhash.xxh3_64_intdigest(checked_namespace(namespace).encode()))

    def seal(self, ids: Ids, values: Sequence[bytes]) -> list[bytes]:
        """Put each value behind its seal."""
        digest = xxhash.xxh3_64_digest
        return [digest(value, seed) + value for value, seed in zip(values, self._seeds(ids), strict=True)]

    def unseal(self, ids: Ids, sealed: Sequence[bytes | None]) -> tuple[list[bytes | None], int]:
        """Return the values, None where there is none or a damaged one, and how many are damaged.

        Takes about 0.25 µs a record of 272 bytes.
        """
        digest = xxhash.xxh3_64_digest
        values = [
            None if raw is None or raw[:SEAL_BYTES] != digest(value := raw[SEAL_BYTES:], seed) else value
            for raw, seed in zip(sealed, self._seeds(ids), strict=True)
        ]
        return values, values.count(None) - sealed.count(None)

    def _seeds(self, ids: Ids) -> list[int]:
        seeds: list[int] = (splitmix64(ids) ^ self._of_namespace).tolist()
        return seeds


class Counters:
    """Counters of a store, updated under its lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = StoreCounts()

    def read(self, values: Sequence[bytes | None], damaged: int = 0) -> None:
        """Count a read of records."""
        misses = values.count(None)
        self._add(hits=len(values) - misses, misses=misses, damaged=damaged)

    def wrote(self, written: int, evicted: int = 0) -> None:
        """Count a write of records and the evictions that it caused."""
        self._add(written=written, evicted=evicted)

    def counts(self, records: int | None = None, stored_bytes: int | None = None) -> StoreCounts:
        """Return the current counts."""
        return replace(self._counts, records=records, stored_bytes=stored_bytes)

    def _add(self, **more: int) -> None:
        with self._lock:
            self._counts = replace(
                self._counts, **{name: getattr(self._counts, name) + number for name, number in more.items()}
            )


def checked_read(ids: Ids) -> Ids:
    """Return ids that can have records: [N] int64 >= 0. Raises InvalidIds."""
    ids = checked_ids(ids)
    if len(ids) and int(ids.min()) < 0:
        raise InvalidIds(f"id {int(ids.min())} is negative; ids lie in [0, 2**63)")
    return ids
