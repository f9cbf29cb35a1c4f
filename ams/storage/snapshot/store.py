"""Stores of snapshots: folders of a local disk, or prefixes of an object store that fsspec knows.

A *place* names a folder: an absolute Path, or a URL without a slash at its end. ``file://`` is the local disk.

| | local disk | URL |
|---|---|---|
| being written | ``ROOT/.staging-NAME-ID/`` | ``ROOT/NAME/ID/`` |
| committed by | a rename to ``ROOT/NAME/``, all synced before | ``ROOT/NAME/manifest.json``, written last |
| its files | ``ROOT/NAME/`` | ``ROOT/NAME/ID/`` |
| removed by | a rename to ``ROOT/.trash-NAME-ID/`` first | the removal of ``manifest.json`` first |

An object store has no rename and no sync: an object is whole and safe, or not there, when its write returns. HDFS shows
files that are half written, and renames in one step: there a file is written beside its place first. Every attempt
writes under an ID of its own, so that a late write of one that was given up spoils no other. Of two that commit one
name at once the later holds. ``ROOT/NAME/ID/`` has a copy of the manifest: taken to a local disk, it is a snapshot.
There are no retries here: fsspec's file systems have their own settings for them.
"""

from __future__ import annotations

import os
import re
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any

import fsspec

from geartrain.ams.observe import failpoints
from geartrain.ams.storage.durable import PART_PREFIX, create_folders, disk, remove_quietly, sync_folder, write_file
from geartrain.ams.storage.snapshot.manifest import DEDUP, JOB, MANIFEST, SNAPSHOT_NAME
from geartrain.ams.values.arguments import path_name
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted, shown_url

if TYPE_CHECKING:
    from typing_extensions import Buffer

Place = Path | str

SCHEMES = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "hdfs")
"""Schemes of URLs of snapshots: object stores and HDFS, with fsspec's aliases."""
_SHOWS_HALVES = ("hdfs",)
"""Schemes whose files are visible before they are whole."""
_LOCAL_SCHEMES = ("file", "local")
_HOST = re.compile(r"([A-Za-z0-9._-]+@)?[A-Za-z0-9._-]+(:[0-9]{1,5})?")
_PART = re.compile(r"[^\x00-\x1f\x7f\\?#]+")
_STAGING, _TRASH = ".staging-", ".trash-"


class RealPath(PosixPath):
    """A local folder that another process named: no link on the way to it is followed."""


class RealName(str):
    """Text of a :class:`RealPath` in a request; :func:`place` makes it a RealPath again."""

    __slots__ = ()


def place(path: str | Path) -> Place:
    """Return the place that a path or URL names.

    Raises InvalidArgument as :func:`parse_place`, and for a URL that fsspec cannot serve as it is installed.
    """
    found = parse_place(path)
    if isinstance(found, str):
        with _open_errors_as_invalid_argument(found):
            fsspec.get_filesystem_class(found.partition("://")[0])
    return found


def parse_place(path: str | Path) -> Place:
    """Return the place that a path or URL names, by its text alone.

    Paths may come from other processes, and fsspec's URLs can name any host, hold other URLs and files that it renders
    as templates. So a URL is one of :data:`SCHEMES` or ``file://``, a bucket or host, and a plain path: no chain
    (``::``), no options, no password. Raises InvalidArgument.
    """
    if isinstance(path, RealPath | RealName):
        return RealPath(path)
    path = path_name("path", path, "the name of a folder, or a URL")
    if "\0" in str(path):
        raise InvalidArgument(f"path is {quoted(path)}; a name has no zero bytes")
    if isinstance(path, Path) or "://" not in path:
        return Path(path).absolute()
    protocol, _, rest = path.partition("://")
    if "::" in path or protocol not in (*SCHEMES, *_LOCAL_SCHEMES):
        legal = ", ".join(f"{scheme}://" for scheme in (*SCHEMES, _LOCAL_SCHEMES[0]))
        raise InvalidArgument(f"{_shown(path)} is no place for snapshots; give a folder, or one URL of {legal}")
    if protocol in _LOCAL_SCHEMES:
        return Path(fsspec.core.url_to_fs(path)[1])
    host, *parts = rest.rstrip("/").split("/")
    has_host = _HOST.fullmatch(host) or (protocol == "hdfs" and not host and parts)  # of HDFS there may be a default
    if not has_host or any(part in (".", "..") or not _PART.fullmatch(part) for part in parts):
        raise InvalidArgument(
            f"{_shown(path)} is no place for snapshots; after {protocol}:// give a bucket, or a host, and a path "
            "without empty parts, '.', '..', options (?, #), passwords, backslashes and control characters"
        )
    return path.rstrip("/")


def _shown(path: str) -> str:
    return quoted(shown_url(path) if "@" in path or "?" in path else path)


def within(folder: Place, name: str) -> Place:
    """Return the place called ``name`` in a folder."""
    return folder / name if isinstance(folder, Path) else f"{folder}/{name}"


def parent_of(folder: Place) -> Place:
    """Return the place that a folder lies in."""
    return folder.parent if isinstance(folder, Path) else folder.rpartition("/")[0]


def name_of(folder: Place) -> str:
    """Return the last part of a place."""
    return folder.name if isinstance(folder, Path) else folder.rpartition("/")[2]


def is_name(name: object) -> bool:
    """Return whether ``name`` is a legal name of a snapshot."""
    return isinstance(name, str) and re.fullmatch(SNAPSHOT_NAME, name) is not None


def store_of(folder: Place) -> _LocalStore | _UrlStore:
    """Return the store that reads and writes ``folder``."""
    return _LocalStore() if isinstance(folder, Path) else _UrlStore(folder)


class _LocalStore:
    """The folders of snapshots and their files. Every method may raise OSError; :class:`_UrlStore` has the same."""

    def staging(self, root: Place, name: str, snapshot_id: str) -> Path:
        """Return the folder to write a snapshot in."""
        return Path(root) / f"{_STAGING}{name}-{snapshot_id}"

    def is_staging(self, folder: Place, snapshot_id: str) -> bool:
        """Return whether ``folder`` is a staging folder of the snapshot."""
        name = name_of(folder)
        return name.startswith(_STAGING) and name.endswith(f"-{snapshot_id}")

    def create(self, staging: Place) -> None:
        """Create the folder and those above it."""
        create_folders(Path(staging).parent)
        disk.create_folder(Path(staging))  # not synced, which would keep a step waiting: its final name is

    def write(self, folder: Place, name: str, *parts: Buffer) -> None:
        """Write a file of these parts, durable, in one step; replace one of that name."""
        with _opened(folder) as here:
            write_file(here / name, *parts)

    def drop(self, folder: Place, name: str) -> None:
        """Remove a file. Raises FileNotFoundError."""
        with _opened(folder) as here:
            (here / name).unlink()

    def sync(self, folder: Place) -> None:
        """Return once the names in the folder are durable."""
        sync_folder(Path(folder))

    def publish(self, staging: Place, final: Place) -> None:
        """Commit the staging folder as snapshot ``final``; after a failure none of that name exists."""
        try:
            failpoints.reach("snapshot.rename.before")
            disk.rename(Path(staging), Path(final))
            failpoints.reach("snapshot.rename.after")
            sync_folder(Path(final).parent)
        except OSError:
            if not Path(staging).exists():
                # Visible, but not known to be safe: whoever is told of a failure must not find it.
                self._discard(Path(final))
            raise

    def exists(self, folder: Place) -> bool:
        """Return whether the folder exists."""
        try:
            with _opened(folder) as here:
                return here.exists()
        except (FileNotFoundError, NotADirectoryError):
            return False

    def files_of(self, folder: Place, snapshot_id: str) -> Place:  # noqa: ARG002
        """Return the folder of a snapshot's files."""
        return folder

    def names(self, folder: Place) -> list[str]:
        """Return the names in a folder. Raises FileNotFoundError."""
        with _opened(folder) as here:
            return [child.name for child in here.iterdir()]

    def size(self, folder: Place, name: str) -> int | None:
        """Return the bytes of a file; None if it is no file. Raises FileNotFoundError."""
        with _opened(folder) as here:
            status = (here / name).lstat()
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def read(self, folder: Place, name: str) -> bytes:
        """Return the content of a file. Raises FileNotFoundError."""
        with _opened(folder) as here:
            descriptor = os.open(here / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would be waited for
        with os.fdopen(descriptor, "rb") as file:
            return file.read()

    def first_written(self, folder: Place) -> float:
        """Return when the oldest file of a snapshot was written, Unix time in seconds; infinity if unknown."""
        return min((child.lstat().st_mtime for child in Path(folder).iterdir()), default=float("inf"))

    def snapshots(self, root: Place) -> list[str]:
        """Return names of snapshots, partly removed ones too. Raises FileNotFoundError without such a root."""
        return [name for name in self.names(root) if is_name(name) and self._is_snapshot(Path(root) / name)]

    def discard(self, staging: Place) -> None:
        """Remove an abandoned snapshot as far as possible. Raises nothing."""
        remove_quietly(Path(staging))

    def hide(self, folder: Place) -> Path:
        """Remove a snapshot from the list in one step; return the folder of its files."""
        trash = Path(folder).with_name(f"{_TRASH}{name_of(folder)}-{uuid.uuid4().hex}")
        disk.rename(Path(folder), trash)
        sync_folder(trash.parent)
        return trash

    def remove(self, hidden: Place) -> None:
        """Remove a folder that :meth:`hide` returned."""
        disk.remove_folder(Path(hidden))

    def sweep(self, root: Place, stale_before: float) -> None:
        """Remove unfinished snapshots last written before ``stale_before`` (Unix time in seconds)."""
        if not Path(root).is_dir():
            return
        for child in sorted(Path(root).iterdir()):
            is_stale = child.name.startswith(_STAGING) and child.stat().st_mtime < stale_before
            if is_stale or child.name.startswith(_TRASH):
                disk.remove_folder(child)

    def _is_snapshot(self, folder: Path) -> bool:
        """Return whether a folder is a snapshot, whole or partly removed, and not another's folder."""
        if not folder.is_dir():
            return False
        try:
            names = self.names(folder)
        except OSError:
            return True  # listed as damaged, with the reason
        return MANIFEST in names or any(
            name.startswith((f"{JOB}-", f"{DEDUP}-")) or name.endswith(".safetensors") for name in names
        )

    def _discard(self, folder: Path) -> None:
        """Remove a snapshot from a failing disk: hide it if possible, else remove its manifest."""
        trash = folder.with_name(f"{_TRASH}{folder.name}-{uuid.uuid4().hex}")
        try:
            disk.rename(folder, trash)
            folder = trash
        except OSError:
            with suppress(OSError):
                (folder / MANIFEST).unlink()
        remove_quietly(folder)


@contextmanager
def _opened(folder: Place) -> Iterator[Path]:
    """Yield a path of the folder that no link redirects: each part of a RealPath is opened in its parent."""
    if not isinstance(folder, RealPath):
        yield Path(folder)
        return
    descriptor = os.open("/", os.O_PATH | os.O_DIRECTORY)
    try:
        for part in folder.parts[1:]:
            if part == "..":
                raise NotADirectoryError(f"{folder} has '..'")
            inner = os.open(part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield Path(f"/proc/self/fd/{descriptor}")
    except OSError as exc:
        exc.filename = exc.filename2 = None  # of this process alone
        raise
    finally:
        os.close(descriptor)


class _UrlStore:
    def __init__(self, url: str) -> None:
        with _open_errors_as_invalid_argument(url):
            self._system: Any = fsspec.core.url_to_fs(url)[0]
        self._shows_halves = url.partition("://")[0] in _SHOWS_HALVES

    def staging(self, root: Place, name: str, snapshot_id: str) -> str:
        return f"{root}/{name}/{snapshot_id}"

    def is_staging(self, folder: Place, snapshot_id: str) -> bool:
        return name_of(folder) == snapshot_id

    def create(self, staging: Place) -> None:
        with _as_os_error():
            self._system.makedirs(str(staging), exist_ok=True)  # which does nothing where there are no folders

    def write(self, folder: Place, name: str, *parts: Buffer) -> None:
        path = f"{folder}/{name}"
        written = f"{folder}/{PART_PREFIX}{uuid.uuid4().hex}-{name}" if self._shows_halves else path
        with _as_os_error():
            self._system.pipe_file(written, b"".join(parts))
            if written != path:
                self._system.mv(written, path)

    def drop(self, folder: Place, name: str) -> None:
        with _as_os_error():
            self._system.rm_file(f"{folder}/{name}")

    def sync(self, folder: Place) -> None:
        pass  # what was written is safe already

    def publish(self, staging: Place, final: Place) -> None:
        try:
            failpoints.reach("snapshot.rename.before")
            self.write(final, MANIFEST, self.read(staging, MANIFEST))
            failpoints.reach("snapshot.rename.after")
        except OSError:
            with suppress(OSError):  # it may have arrived all the same
                self.hide(final)
            raise

    def exists(self, folder: Place) -> bool:
        return MANIFEST in self._names_or_none(folder)

    def files_of(self, folder: Place, snapshot_id: str) -> str:
        return f"{folder}/{snapshot_id}"

    def names(self, folder: Place) -> list[str]:
        with _as_os_error():
            self._system.invalidate_cache()
            paths = self._system.ls(str(folder), detail=False)
        return [name for path in paths if (name := path.rstrip("/").rpartition("/")[2])]

    def size(self, folder: Place, name: str) -> int | None:
        with _as_os_error():
            self._system.invalidate_cache()
            found = self._system.info(f"{folder}/{name}")
        return int(found["size"]) if found["type"] == "file" else None

    def read(self, folder: Place, name: str) -> bytes:
        with _as_os_error():
            return bytes(self._system.cat_file(f"{folder}/{name}"))

    def first_written(self, folder: Place) -> float:
        return min(self._times(self._files(folder)), default=float("inf"))

    def snapshots(self, root: Place) -> list[str]:
        return [name for name in self.names(root) if is_name(name) and self.exists(f"{root}/{name}")]

    def discard(self, staging: Place) -> None:
        with suppress(OSError):
            self.remove(staging)

    def hide(self, folder: Place) -> str:
        with _as_os_error():
            self._system.rm_file(f"{folder}/{MANIFEST}")
        return str(folder)

    def remove(self, hidden: Place) -> None:
        with _as_os_error():
            self._system.invalidate_cache()
            self._system.rm(str(hidden), recursive=True)

    def sweep(self, root: Place, stale_before: float) -> None:
        for name in self._names_or_none(root):
            folder = f"{root}/{name}"
            if is_name(name) and not self.exists(folder) and self._last_written(folder) < stale_before:
                self.remove(folder)

    def _names_or_none(self, folder: Place) -> list[str]:
        try:
            return self.names(folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _last_written(self, folder: str) -> float:
        """Return the Unix time of the last write in seconds; infinity if it is no attempt or the time is unknown."""
        attempts = [path for path in self._files(folder) if re.search(r"/[0-9a-f]{32}/[^/]+$", path)]
        return max(self._times(attempts), default=float("inf"))

    def _files(self, folder: Place) -> list[str]:
        with _as_os_error():
            self._system.invalidate_cache()
            return list(self._system.find(str(folder)))

    def _times(self, paths: list[str]) -> list[float]:
        """Return the Unix times of writes of files in seconds; empty if the file system has none."""
        with _as_os_error():
            try:
                times: list[datetime] = [self._system.modified(path) for path in paths]
            except NotImplementedError:  # as fsspec says it
                return []
        return [time.timestamp() for time in times]


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Raise the errors of any file system's library as OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as exc:
        raise OSError(f"{type(exc).__name__}: {exc}") from exc


@contextmanager
def _open_errors_as_invalid_argument(url: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, ImportError) as exc:
        is_s3 = url.partition("://")[0] in ("s3", "s3a") and isinstance(exc, ImportError)
        remedy = "pip install 'geartrain[s3]'" if is_s3 else "install the package that serves it"
        raise InvalidArgument(f"{url!r} cannot be opened ({exc}); {remedy}, or give a folder") from exc
