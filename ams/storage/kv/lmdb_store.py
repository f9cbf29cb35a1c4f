"""Small state in LMDB: one write transaction a change, synced before the call returns.

LMDB checks nothing that it reads. So each value has a seal. A record of the number of keys and the sum of their
checksums shows that keys are gone. A file of a few bytes, ``revision``, written after each transaction, shows that the
store fell back to an older one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

import lmdb
import xxhash

from geartrain.ams.storage.kv.lmdb_file import check_structure, commit, lock_folder, open_environment
from geartrain.ams.storage.kv.store import REMEDY, apply_changes, seal, unseal
from geartrain.ams.values.errors import StateDamaged, StateFailed

_FILE = "state.lmdb"
_FIRST_MAP_BYTES = 16 << 20
_RECORD = b"\0record"
"""Key of the record of all keys; no other key begins with a zero."""


class LmdbStore:
    """A :class:`KeyValueStore` in a folder, which it holds alone. Keys are at most 500 bytes in UTF-8."""

    def __init__(self, folder: str | Path) -> None:
        """Open the store, or create it. Raises ConfigError (not a folder that can be used, or in use), StateDamaged."""
        self._folder = Path(folder)
        self._path = self._folder / _FILE
        self._environment: lmdb.Environment | None = None
        self._failure: str | None = None
        self._mutex = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._sums: dict[str, int] = {}
        self._revision = 0
        self._lock = lock_folder(self._folder, "end that one, or give another folder")
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def read_all(self) -> dict[str, bytes]:
        with self._mutex:
            return dict(self._values)

    def write(self, changes: Mapping[str, bytes | None]) -> None:
        with self._mutex:
            self._write(changes)

    def _write(self, changes: Mapping[str, bytes | None]) -> None:
        if self._failure is not None:
            raise StateFailed(self._failure)
        sealed = {key: None if value is None else seal(key, value) for key, value in changes.items()}
        sums = dict(self._sums)
        for key, value in sealed.items():
            sums.pop(key, None)
            if value is not None:
                sums[key] = _sum(key, value)
        revision = self._revision + 1
        try:
            self._commit(sealed, _record(revision, sums))
            self._write_revision(revision)
        except (lmdb.Error, OSError) as exc:
            # What is on the disk is not known any more, so nothing may be built on it.
            self._failure = f"{self._path} could not be written: {exc}; mend the cause and start this role again"
            raise StateFailed(self._failure) from exc
        self._revision, self._sums = revision, sums
        apply_changes(self._values, changes)

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()
            self._environment = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _open(self) -> None:
        check_structure(self._path, REMEDY, first_map_bytes=_FIRST_MAP_BYTES)
        try:
            self._environment = open_environment(self._path, first_map_bytes=_FIRST_MAP_BYTES)
            raw = _entries(self._environment)
        except lmdb.Error as exc:
            raise StateDamaged(f"{self._path}: {exc}; {REMEDY}") from exc
        record = raw.pop(_RECORD, None)
        noted = self._noted()
        for name, sealed in raw.items():
            key = name.decode(errors="backslashreplace")
            self._values[key] = unseal(key, sealed, str(self._path))
            self._sums[key] = _sum(key, sealed)
        if record is None and not raw and not noted:
            if noted is None:
                self._write_revision(0)
            return  # nothing was ever written
        if noted is None:
            raise StateDamaged(f"{self._folder / 'revision'}: it is missing; {REMEDY}")
        self._revision = int.from_bytes((record or b"")[:8], "little")
        if record != _record(self._revision, self._sums):
            raise StateDamaged(f"{self._path}: keys are missing, or its record of them is damaged; {REMEDY}")
        if self._revision < noted:
            raise StateDamaged(
                f"{self._path}: it is at revision {self._revision}, but {noted} was acknowledged; {REMEDY}"
            )

    def _commit(self, sealed: Mapping[str, bytes | None], record: bytes) -> None:
        environment = self._environment
        assert environment is not None, "the store is closed"

        def change(transaction: lmdb.Transaction) -> None:
            for key, value in sealed.items():
                if value is None:
                    transaction.delete(key.encode())
                else:
                    transaction.put(key.encode(), value)
            transaction.put(_RECORD, record)

        commit(environment, change)

    def _noted(self) -> int | None:
        path = self._folder / "revision"
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        if data != _encode_revision(int.from_bytes(data[:8], "little")):
            raise StateDamaged(f"{path}: it is damaged (its checksum is another); {REMEDY}")
        return int.from_bytes(data[:8], "little")

    def _write_revision(self, revision: int) -> None:
        path = self._folder / "revision"
        is_new = not path.exists()
        written = path.with_name("revision.new") if is_new else path
        descriptor = os.open(written, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(descriptor, _encode_revision(revision), 0)  # within one sector: whole or not at all
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        if is_new:
            written.rename(path)
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def _entries(environment: lmdb.Environment) -> dict[bytes, bytes]:
    with environment.begin() as transaction:
        return {bytes(key): bytes(value) for key, value in transaction.cursor()}


def _sum(key: str, sealed: bytes) -> int:
    return xxhash.xxh3_64(key.encode() + b"\0" + sealed).intdigest()


def _record(revision: int, sums: Mapping[str, int]) -> bytes:
    total = 0
    for checksum in sums.values():
        total ^= checksum
    body = b"".join(number.to_bytes(8, "little") for number in (revision, len(sums), total))
    return body + xxhash.xxh3_64(body).digest()


def _encode_revision(revision: int) -> bytes:
    body = revision.to_bytes(8, "little")
    return body + xxhash.xxh3_64(body).digest()
