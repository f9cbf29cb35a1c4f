"""Writing that survives a loss of power: everything that changes the disk for a snapshot goes through :data:`disk`.

A file is safe once it is synced *and* the folder that names it is synced. Tests replace methods of :data:`disk` to
record the order of these calls and to make any of them fail.
"""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from geartrain.ams.observe import failpoints
from geartrain.ams.values.errors import SnapshotFailed

if TYPE_CHECKING:
    from typing_extensions import Buffer

PART_PREFIX = ".part-"
"""Begins the name of a file that is being written. Readers pass over names that begin with a dot."""


class Disk:
    """The calls that change a disk. Each raises OSError."""

    def create_folder(self, path: Path) -> None:
        """Create one folder, whose parent exists."""
        path.mkdir()

    def write(self, file: BinaryIO, data: Buffer) -> None:
        """Write all of ``data`` and hand it to the operating system."""
        file.write(data)
        file.flush()

    def sync(self, descriptor: int, path: Path) -> None:  # noqa: ARG002
        """Return once the open file or folder is on the medium; ``path`` is its name, for those who watch."""
        os.fsync(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Give ``source`` the name ``target``, in one step. A file of that name is replaced."""
        source.replace(target)

    def remove_folder(self, path: Path) -> None:
        """Remove a folder and all it holds."""
        shutil.rmtree(path)


disk = Disk()


def create_folders(path: Path) -> None:
    """Create ``path`` and its missing ancestors, each synced into its parent. Existing ones are left as they are."""
    missing = []
    while not path.exists():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        try:
            disk.create_folder(folder)
        except FileExistsError:
            continue  # by another process in the meantime
        sync_folder(folder.parent)


def write_file(path: Path, *parts: Buffer) -> None:
    """Write a file of these parts that appears under its name whole and synced, or not at all. Its folder is not
    synced."""
    part = path.with_name(f"{PART_PREFIX}{uuid.uuid4().hex}-{path.name}")
    try:
        with part.open("xb") as file:
            for data in parts:
                disk.write(file, data)
            failpoints.reach("file.sync.before")
            disk.sync(file.fileno(), path)
        failpoints.reach("file.rename.before")
        disk.rename(part, path)
    except Exception:
        with suppress(OSError):  # readers pass over what is left
            part.unlink(missing_ok=True)
        raise


def sync_folder(path: Path) -> None:
    """Return once the names in the folder are on the medium."""
    failpoints.reach("folder.sync.before")
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        disk.sync(descriptor, path)
    finally:
        os.close(descriptor)


def remove_quietly(folder: Path) -> None:
    """Remove what can be removed of a folder that no reader takes for a snapshot."""
    shutil.rmtree(folder, ignore_errors=True)


def failed(what: str, exc: OSError) -> SnapshotFailed:
    """Return the error for ``what`` ("snapshot 'a' was not written"), with the remedy that its cause suggests."""
    reason = exc.strerror or exc  # without the name of a staging folder: the place is in ``what``
    return SnapshotFailed(
        f"{what}: {reason}. {_REMEDIES.get(exc.errno or 0, _REMEDY)}; older snapshots are as they were"
    )


_REMEDY = "Mend the cause and try again"
_REMEDIES = {
    errno.ENOSPC: "Free space on that disk or give another folder",
    errno.EDQUOT: "Free space within the quota or give another folder",
    errno.EIO: "The disk fails: read the system's log and give a folder on another disk",
    errno.EROFS: "The file system is read-only: give another folder",
    errno.EACCES: "Let this user write there or give another folder",
    errno.EPERM: "Let this user write there or give another folder",
    errno.ENOTDIR: "A file is in its way: give a folder",
    errno.EEXIST: "A file is in its way: give a folder",
    errno.ENOENT: "The folder cannot be made, or the snapshot was abandoned: give a folder that can be written",
}
