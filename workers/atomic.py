"""Atomic writes of files and folders: they appear complete or not at all."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def sole_user(folder: Path) -> Iterator[None]:
    """Lock ``folder`` against other processes of this machine; the lock leaves no trace. Raises BlockingIOError if one
    of them has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not (folder.exists() and os.path.samestat(os.fstat(descriptor), folder.stat())):
            raise BlockingIOError(errno.EWOULDBLOCK, "a process that had it removed it meanwhile", str(folder))
        yield
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path beside ``path`` to write to; it is renamed to ``path`` once the block has succeeded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with _named(path):
            temporary.touch()
        yield temporary
        _sync(temporary)
        with _named(path):
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; it is renamed to ``path`` once the block has succeeded.

    The old folder is renamed once the new one is on disk, and removed last, so that one of the two is always
    complete: :func:`complete_folder` finds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    shutil.rmtree(temporary, ignore_errors=True)
    with _named(path):
        temporary.mkdir()
    try:
        yield temporary
        previous = previous_folder(path)
        if path.exists():
            for written in (file for file in temporary.rglob("*") if file.is_file()):
                _sync(written)
            shutil.rmtree(previous, ignore_errors=True)
            path.rename(previous)
        temporary.rename(path)
        shutil.rmtree(previous, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Raise errors about the part of ``path`` with the name ``path``, which a person knows."""
    try:
        yield
    except OSError as exc:
        raise OSError(exc.errno, exc.strerror, str(path)) from exc


def _sync(path: Path) -> None:
    with path.open("rb") as written:
        os.fsync(written.fileno())


def previous_folder(path: Path) -> Path:
    """Return the place of the old folder during its replacement."""
    path = path.absolute()  # "." has no name
    return path.with_name(f".{path.name}.previous")


def complete_folder(path: Path) -> Path:
    """Return ``path``, or the folder it replaced if a crash fell between the two renames."""
    previous = previous_folder(path)
    return previous if not path.exists() and previous.exists() else path


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
