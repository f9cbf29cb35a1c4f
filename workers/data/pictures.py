"""Pictures that are found now and read later, wherever they lie."""

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
    """One picture of a class: some 150 bytes, for a data set of millions has as many."""

    path: Path
    """Its file, or the archive that it is in."""
    read: Callable[[Picture], Image.Image]
    """How to find and decode it. Raises InvalidArgument."""
    offset: int = 0
    """Where in the archive it begins."""
    size: int = 0
    """Bytes there, if they can be told beforehand."""
    place: str = ""
    """The place in the archive, as errors name it."""

    @property
    def where(self) -> str:
        """File, and place within it, as errors name it."""
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
    """Group pictures by class, classes rising: as numbers if all are. Raises InvalidArgument for fewer than two."""
    classes: dict[str, list[Picture]] = {}
    for name, picture in labelled:
        classes.setdefault(name, []).append(picture)
    if len(classes) < 2:
        raise InvalidArgument(f"{source} has pictures of {len(classes)} classes; a classifier needs at least 2")
    are_numbers = all(name.isascii() and name.isdigit() for name in classes)
    return {name: classes[name] for name in sorted(classes, key=_as_number if are_numbers else None)}


def _as_number(name: str) -> tuple[int, str, str]:
    """Orders digits as the numbers they are, however many."""
    digits = name.lstrip("0")
    return len(digits), digits, name
