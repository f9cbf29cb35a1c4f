"""LMDB file in a folder of one process, shared code of all stores in LMDB.

LMDB checks nothing that it reads, and a damaged page may crash the reader. So an existing file is first walked by a
process of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lmdb

from geartrain.ams.values.errors import ConfigError, InternalError, StateDamaged

_WALKED_BYTES_PER_SECOND = 20 << 20
_SHORTEST_WALK_SECONDS = 60.0


def lock_folder(folder: Path, remedy: str) -> int:
    """Create and lock the folder; return the descriptor that holds the lock.

    Raises ConfigError, with the ``remedy``, if another process holds it, or the folder cannot be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        raise ConfigError(
            f"the folder {str(folder)!r} cannot be used ({exc.strerror}); give a folder where you may write"
        ) from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(lock)
        raise ConfigError(f"the folder {str(folder)!r} is in use by another live process; {remedy}") from exc
    return lock


def open_environment(
    path: Path, *, first_map_bytes: int, readonly: bool = False, sync: bool = True
) -> lmdb.Environment:
    """Open the file, or create it. Raises lmdb.Error."""
    size = path.stat().st_size if path.exists() else 0
    return lmdb.open(
        str(path),
        subdir=False,
        map_size=max(first_map_bytes, size),
        lock=False,
        readonly=readonly,
        sync=sync,
    )


def commit(environment: lmdb.Environment, change: Callable[[lmdb.Transaction], None]) -> None:
    """Commit a ``change`` in one transaction, doubling the map while it is too small. Raises lmdb.Error."""
    while True:
        try:
            with environment.begin(write=True) as transaction:
                change(transaction)
            return
        except lmdb.MapFullError:
            environment.set_mapsize(2 * int(environment.info()["map_size"]))


_SENT_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)
"""Signals that a damaged file does not cause."""


def check_structure(path: Path, remedy: str, *, first_map_bytes: int) -> None:
    """Walk the whole file, if it is there, in another process. Raises StateDamaged with the ``remedy``, and
    InternalError if somebody ended that process, the system for want of memory perhaps: of the file that says nothing.

    In a map as large as that of who opens it next: LMDB follows sizes that are beyond the file as far as the map goes.
    """
    if not path.exists():
        return
    seconds = _SHORTEST_WALK_SECONDS + path.stat().st_size / _WALKED_BYTES_PER_SECOND
    command = [sys.executable, "-P", "-m", __name__, str(path), str(first_map_bytes)]
    try:
        walked = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        why = walked.stderr.strip().splitlines()[-1:] or [f"reading it ends with {walked.returncode}"]
        is_whole = walked.returncode == 0
        if -walked.returncode in _SENT_SIGNALS:
            raise InternalError(
                f"{path}: the process that looks through it was ended by signal {-walked.returncode}, perhaps for "
                "want of memory; nothing was changed. Start again"
            )
    except subprocess.TimeoutExpired:
        why, is_whole = [f"reading it takes more than {seconds:.0f} s"], False
    if not is_whole:
        raise StateDamaged(f"{path}: its structure is damaged ({why[0]}); {remedy}")


def _walk(path: Path, first_map_bytes: int) -> None:
    environment = open_environment(path, first_map_bytes=first_map_bytes, readonly=True)
    with contextlib.closing(environment), environment.begin() as transaction:
        for key, value in transaction.cursor():
            hash((bytes(key), bytes(value)))  # every byte is read


if __name__ == "__main__":
    _walk(Path(sys.argv[1]), int(sys.argv[2]))
