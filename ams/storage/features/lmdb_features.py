"""Feature store in an LMDB file, held by one process.

A call is one write transaction, not synced to the disk: an fsync takes milliseconds, for which requests of features
would wait. Records survive the process; a loss of power may damage the file. Each record is sealed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import lmdb
import numpy as np

from geartrain.ams.storage.features.byte_lru import ByteLru
from geartrain.ams.storage.features.store import (
    SEAL_BYTES,
    Counters,
    Seals,
    StoreCounts,
    checked_read,
    checked_records,
)
from geartrain.ams.storage.kv.lmdb_file import check_structure, commit, lock_folder, open_environment
from geartrain.ams.values.errors import StateDamaged, StateFailed
from geartrain.ams.values.specs import Ids

_FILE = "features.lmdb"
_FIRST_MAP_BYTES = 64 << 20
_TICK_BYTES = 8
_OVERHEAD = SEAL_BYTES + _TICK_BYTES
_REMEDY = "what it held can be made again: remove the folder and start anew"


class LmdbFeatures:
    """A :class:`FeatureStore` in ``FOLDER/NAMESPACE``.

    The least recently used records are evicted. The order of use is kept in memory, 64 bytes a record; after a restart
    it is the order in which the records were last written. The file does not shrink, its pages are used again: it is
    about 1.5 × ``max_bytes`` at most for records of a few hundred bytes.
    """

    def __init__(self, folder: str | Path, namespace: str, *, max_bytes: int | None = None) -> None:
        """Open the store, or create it.

        Raises ConfigError (not a folder that can be used, or in use), StateDamaged. O(records) where it exists.
        """
        self.namespace = namespace
        self._seals = Seals(namespace)
        self._folder = Path(folder) / quote(namespace, safe="")
        self._path = self._folder / _FILE
        self._lru = ByteLru(max_bytes)
        self._counters = Counters()
        self._tick = 0
        self._mutex = threading.Lock()
        self._environment: lmdb.Environment | None = None
        self._lock = lock_folder(self._folder, "give another folder, or share a Redis server: redis://HOST:PORT/0")
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def read(self, ids: Ids) -> list[bytes | None]:
        ids = checked_read(ids)
        keys = _keys(ids)
        with self._mutex:
            held = (self._lru.use(ids) >= 0).tolist()
            try:
                with self._opened().begin() as transaction:
                    take = transaction.get
                    sealed = [take(key) if is_held else None for key, is_held in zip(keys, held, strict=True)]
            except lmdb.Error as exc:
                raise StateDamaged(f"{self._path}: {exc}; {_REMEDY}") from exc
        values, damaged = self._seals.unseal(ids, sealed)
        self._counters.read(values, damaged)
        return [None if value is None else value[_TICK_BYTES:] for value in values]

    def write(self, ids: Ids, values: Sequence[bytes]) -> None:
        most = None if self._lru.max_bytes is None else self._lru.max_bytes - _OVERHEAD
        ids, kept = checked_records(checked_read(ids), values, most)
        sizes = np.fromiter(map(len, kept), np.int64, len(kept)) + _OVERHEAD
        with self._mutex:
            self._tick += 1
            tick = self._tick.to_bytes(_TICK_BYTES, "little")
            sealed = self._seals.seal(ids, [tick + value for value in kept])
            _, gone, _ = self._lru.insert(ids, sizes)
            self._commit(dict(zip(_keys(ids), sealed, strict=True)), _keys(gone))
        self._counters.wrote(len(kept), len(gone))

    def remove(self, ids: Ids) -> None:
        ids = checked_read(ids)
        with self._mutex:
            self._commit({}, _keys(self._lru.drop(ids)[0]))

    def counts(self) -> StoreCounts:
        with self._mutex:
            return self._counters.counts(len(self._lru), self._lru.total_bytes)

    def close(self) -> None:
        with self._mutex:
            if self._environment is not None:
                self._environment.close()
                self._environment = None
            if self._lock >= 0:
                os.close(self._lock)
                self._lock = -1

    def _open(self) -> None:
        check_structure(self._path, _REMEDY, first_map_bytes=_FIRST_MAP_BYTES)
        try:
            self._environment = open_environment(self._path, first_map_bytes=_FIRST_MAP_BYTES, sync=False)
            ids, ticks, sizes = _records(self._environment)
        except lmdb.Error as exc:
            raise StateDamaged(f"{self._path}: {exc}; {_REMEDY}") from exc
        order = np.argsort(ticks, kind="stable")
        _, gone, _ = self._lru.insert(ids[order], sizes[order])
        self._tick = int(ticks.max(initial=0))
        self._commit({}, _keys(gone))

    def _opened(self) -> lmdb.Environment:
        if self._environment is None:
            raise StateFailed(f"{self._path} was closed; open the store again")
        return self._environment

    def _commit(self, changes: dict[bytes, bytes], dropped: Sequence[bytes]) -> None:
        environment, gone = self._opened(), set(dropped)

        def change(transaction: lmdb.Transaction) -> None:
            for key in gone:
                transaction.delete(key)
            for key, value in sorted(changes.items()):
                if key not in gone:
                    transaction.put(key, value)

        try:
            commit(environment, change)
        except (lmdb.Error, OSError) as exc:
            raise StateFailed(f"{self._path} could not be written: {exc}; mend the cause and start again") from exc


def _keys(ids: Ids) -> list[bytes]:
    """Return keys in big-endian order, so that the file is sorted by id."""
    keys: list[bytes] = ids.astype(">i8").view("V8").tolist()
    return keys


def _records(environment: lmdb.Environment) -> tuple[Ids, Ids, Ids]:
    """Return distinct ids, ticks and sizes [R] of all records; what has no room for a seal and a tick is left out."""
    found = []
    with environment.begin(buffers=True) as transaction:
        for key, value in transaction.cursor():
            if len(key) == 8 and len(value) >= _OVERHEAD:
                tick = int.from_bytes(value[SEAL_BYTES:_OVERHEAD], "little") % 2**63
                found.append((int.from_bytes(key, "big") % 2**63, tick, len(value)))
    table = np.array(found, np.int64).reshape(-1, 3)
    _, kept = np.unique(table[:, 0], return_index=True)  # damaged keys may be equal
    return table[kept, 0], table[kept, 1], table[kept, 2]
