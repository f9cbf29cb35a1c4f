"""Files of a data source: a file, a folder, a pattern, or any URL that fsspec supports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from geartrain.ams.values.arguments import path_name
from geartrain.ams.values.errors import InvalidArgument, SourceDamaged, SourceNotFound
from geartrain.ams.values.text import quoted

Sources = str | Path | Sequence[str | Path]
_KIND = "a file, a folder, a pattern with *, a URL, or a list of them"


@dataclass(frozen=True)
class DataFile:
    """One file of a source."""

    name: str
    """Path or URL, for messages."""
    inner_name: str
    """Path below the given folder: the same on machines that mount it elsewhere."""
    system: Any
    """fsspec file system of the file."""
    path: str
    """Path in the file system."""
    num_bytes: int

    def open(self) -> Any:
        """Open it for reading bytes. Raises SourceDamaged if it is gone, or its size has changed since it was found."""
        try:
            now = self.system.info(self.path)["size"]
            if now == self.num_bytes:
                return self.system.open(self.path, "rb")
        except OSError as exc:
            raise SourceDamaged(f"{self.name} cannot be opened: {exc}") from exc
        raise SourceDamaged(
            f"{self.name} has changed: it had {self.num_bytes} bytes when it was found and has {now}. Write changed "
            "files under other names, and open the source again"
        )


def find_files(where: Sources, suffixes: tuple[str, ...]) -> list[DataFile]:
    """Return the files of a source: places in the given order, the files of each sorted by name. Of a folder, all below
    it with one of ``suffixes``, except those whose name, or whose folder's name, begins with ``.`` or ``_``.

    Raises SourceNotFound if there is none, InvalidArgument if ``where`` is no place.
    """
    places = [where] if isinstance(where, str | Path) or not isinstance(where, Sequence) else list(where)
    found = [file for place in places for file in _files_of(path_name("the source", place, _KIND), suffixes)]
    if not found:
        raise SourceNotFound("the list of files is empty; give at least one")
    return found


def _files_of(place: str | Path, suffixes: tuple[str, ...]) -> list[DataFile]:
    url = str(place)
    try:
        system, root = fsspec.core.url_to_fs(url)
    except (ValueError, ImportError) as exc:
        raise InvalidArgument(f"{quoted(url)} is no place that fsspec can read: {exc}") from exc
    is_local = "://" not in url
    try:
        if any(sign in root for sign in "*?[") and not system.exists(root):
            found = system.glob(root, detail=True)
            paths = {path: info["size"] for path, info in found.items() if info["type"] == "file"}
            base = str(PurePosixPath(root[: min(root.index(sign) for sign in "*?[" if sign in root)] + "x").parent)
        elif system.isdir(root):
            found = system.find(root, detail=True)
            paths = {
                path: info["size"]
                for path, info in found.items()
                if path.endswith(suffixes) and not _is_hidden(path, root)
            }
            base = root
        else:
            paths = {root: system.info(root)["size"]}
            base = str(PurePosixPath(root).parent)
    except FileNotFoundError as exc:
        raise SourceNotFound(f"{url} is not there; give {_KIND}") from exc
    except OSError as exc:
        raise SourceNotFound(f"{url} cannot be listed: {exc}") from exc
    if not paths:
        raise SourceNotFound(f"{url} holds no file that ends in {' or '.join(suffixes)}")
    return [
        DataFile(
            name=path if is_local else system.unstrip_protocol(path),
            inner_name=path.removeprefix(base).lstrip("/"),
            system=system,
            path=path,
            num_bytes=int(paths[path]),
        )
        for path in sorted(paths)
    ]


def _is_hidden(path: str, root: str) -> bool:
    return any(part.startswith((".", "_")) for part in PurePosixPath(path.removeprefix(root).lstrip("/")).parts)
