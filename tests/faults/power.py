"""A disk that loses its power: only what was synced is there afterwards.

``os.fsync`` and ``os.fdatasync`` note the content of the file, or the names in the folder, that they are given. From
that it rebuilds what a disk would hold after a loss of power, in two legal ways: names survive only if their folder was
synced, or every name survives while unsynced content does not.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Literal

import pytest

Names = Literal["synced names", "all names"]


class PowerLost(BaseException):
    """Nothing runs any more."""


class VolatileDisk:
    """Watches what is synced below ``root``, which itself is there for good."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path) -> None:
        self._root = root
        self._contents: dict[int, bytes] = {}
        """Synced content of a file, by inode."""
        self._names: dict[int, dict[str, int]] = {}
        """Synced names of a folder, by inode."""
        self._held: list[int] = []
        """Descriptors that keep inodes from being given to other files."""
        for name in ("fsync", "fdatasync"):
            patch.setattr(os, name, self._synced)
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        self._synced(descriptor)
        os.close(descriptor)

    def close(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)

    def after_the_loss(self, target: Path, names: Names) -> Path:
        """Build in ``target`` what the disk may hold now."""
        self._rebuild(self._root.stat().st_ino, self._root, target, names)
        return target

    def _synced(self, descriptor: int) -> None:
        held = os.dup(descriptor)
        self._held.append(held)
        status = os.fstat(held)
        if stat.S_ISDIR(status.st_mode):
            self._names[status.st_ino] = {entry.name: entry.inode() for entry in os.scandir(held)}
        else:
            self._contents[status.st_ino] = Path(f"/proc/self/fd/{held}").read_bytes()

    def _rebuild(self, inode: int, now: Path | None, target: Path, names: Names) -> None:
        present = {} if now is None else {entry.name: entry.inode() for entry in os.scandir(now)}
        kept = present if names == "all names" else self._names.get(inode, {})
        target.mkdir()
        for name, child in kept.items():
            path = None if now is None or present.get(name) != child else now / name
            if child in self._names or (path is not None and path.is_dir()):
                self._rebuild(child, path, target / name, names)
            else:
                (target / name).write_bytes(self._contents.get(child, b""))
