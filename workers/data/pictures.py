"""Pictures that are found now and read later, wherever they lie."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from geartrain.ams.values.errors import InvalidArgument
from geartrain.workers.data.bitmaps import decode_picture


@dataclass(frozen=True)
class Picture:
    """One picture of a class."""

    where: str
    """File, and offset within it, as errors name it."""
    open: Callable[[], Image.Image]
    """Read and decode it. Raises InvalidArgument."""


def picture_within(path: Path, offset: int, size: int, where: str) -> Picture:
    """The picture whose encoded bytes are ``size`` of ``path`` from ``offset`` on."""
    return Picture(where, lambda: decode_picture(io.BytesIO(_read_part(path, offset, size, where)), where))


def _read_part(path: Path, offset: int, size: int, where: str) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(size)
    if len(data) != size:
        raise InvalidArgument(f"{where} is cut: {len(data)} of {size} bytes are there; copy the file anew")
    return data


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
