"""Key-value stores of small state: their protocol, and the one in memory.

Every value begins with the XXH3 of its key and bytes, so that a read finds one that was changed, cut or moved.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Protocol

import xxhash

from geartrain.ams.values.errors import StateDamaged

_SEAL_BYTES = 8


class KeyValueStore(Protocol):
    """Small state under string keys, durable or not. Thread-safe."""

    def read_all(self) -> dict[str, bytes]:
        """Return every value by its key. Raises StateDamaged, naming the key or the file."""

    def write(self, changes: Mapping[str, bytes | None]) -> None:
        """Set these values (None: remove) all at once; return when that survives a loss of power.

        Raises StateFailed: whether it was written is unknown, and no further change is taken.
        """

    def close(self) -> None:
        """Close the store. Idempotent."""


class MemoryStore:
    """Key-value store in memory, which ends with its process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def read_all(self) -> dict[str, bytes]:
        with self._lock:
            return dict(self._values)

    def write(self, changes: Mapping[str, bytes | None]) -> None:
        with self._lock:
            apply_changes(self._values, changes)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def apply_changes(values: dict[str, bytes], changes: Mapping[str, bytes | None]) -> None:
    """Set these values (None: remove) in memory."""
    for key, value in changes.items():
        if value is None:
            values.pop(key, None)
        else:
            values[key] = value


def seal(key: str, value: bytes) -> bytes:
    """Return ``value`` behind its checksum."""
    return _checksum(key, value) + value


def unseal(key: str, sealed: bytes, place: str) -> bytes:
    """Return the value that was sealed under ``key``. Raises StateDamaged, naming the key and the ``place``."""
    value = bytes(sealed[_SEAL_BYTES:])
    if len(sealed) < _SEAL_BYTES or sealed[:_SEAL_BYTES] != _checksum(key, value):
        raise StateDamaged(f"{place}: the value of key {key!r} is damaged (its checksum is another); {REMEDY}")
    return value


REMEDY = "give a copy of the folder, or an empty folder and start the cluster anew from a snapshot"


def _checksum(key: str, value: bytes) -> bytes:
    return xxhash.xxh3_64(key.encode() + b"\0" + value).digest()
