"""Pictures in files or archives, listed first and read later."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from geartrain.ams.values.errors import InvalidArgument
from geartrain.workers.data.bitmaps import decode_picture, open_picture, require_file_bytes


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture of a class: some 150 bytes, as a data set may have millions."""

    path: Path
    """Its file, or the archive that contains it."""
    read: Callable[[Picture], Image.Image]
    """Function that reads and decodes it. Raises InvalidArgument."""
    offset: int = 0
    """Start in the archive."""
    size: int = 0
    """Size in the archive in bytes, if known beforehand."""
    place: str = ""
    """Place in the archive, for errors."""

    @property
    def where(self) -> str:
        """File, and place within it, for errors."""
        return f"{self.path}{self.place}"

    def open(self) -> Image.Image:
        """Read and decode it. Raises InvalidArgument."""
        return self.read(self)


def read_file(picture: Picture) -> Image.Image:
    """Decode a picture that is a file of its own."""
    return open_picture(picture.path)


def read_part(picture: Picture) -> Image.Image:
    """Decode a picture whose encoded bytes are ``size`` of the file from ``offset`` on."""
    require_file_bytes(picture.size, picture.where)
    with picture.path.open("rb") as file:
        file.seek(picture.offset)
        data = file.read(picture.size)
    if len(data) != picture.size:
        raise InvalidArgument(
            f"{picture.where} is cut: {len(data)} of {picture.size} bytes are there; copy the file anew"
        )
    return decode_picture(io.BytesIO(data), picture.where)


def by_class(labelled: Iterable[tuple[str, Picture]], source: str) -> dict[str, list[Picture]]:
    """Group pictures by class, classes ascending: as numbers if all are. Raises InvalidArgument for fewer than two."""
    classes: dict[str, list[Picture]] = {}
    for name, picture in labelled:
        classes.setdefault(name, []).append(picture)
    if len(classes) < 2:
        raise InvalidArgument(f"{source} has pictures of {len(classes)} classes; a classifier needs at least 2")
    are_numbers = all(name.isascii() and name.isdigit() for name in classes)
    return {name: classes[name] for name in sorted(classes, key=_as_number if are_numbers else None)}


def _as_number(name: str) -> tuple[int, str, str]:
    """Return a key that orders digits as numbers of any length."""
    digits = name.lstrip("0")
    return len(digits), digits, name
