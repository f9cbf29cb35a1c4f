"""Posters of films that nobody has drawn: made from genres and year, so that what is alike looks alike.

MovieLens-100K has no pictures that may be fetched. These carry nothing that the ids do not; they show that images of
items train beside ids.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from geartrain.ams.values.strings import hash_strings

SIDE = 12
"""Pixels."""
_FIRST_YEAR, _YEARS = 1920, 80


def poster(genres: Sequence[str], year: int | None) -> npt.NDArray[np.float32]:
    """Draw stripes of the genres' colours, and a bar, longer if the film is newer: [SIDE · SIDE · 3] in [0, 1].

    The same arguments give the same pixels on every machine.
    """
    sheet = Image.new("RGB", (SIDE, SIDE), (0, 0, 0))
    pen = ImageDraw.Draw(sheet)
    for place, genre in enumerate(sorted(genres)):
        top, bottom = place * (SIDE - 2) // len(genres), (place + 1) * (SIDE - 2) // len(genres)
        pen.rectangle((0, top, SIDE - 1, bottom - 1), fill=_colour(genre))
    if year is not None:
        length = min(max((year - _FIRST_YEAR) * SIDE // _YEARS, 0), SIDE - 1)
        pen.rectangle((0, SIDE - 2, length, SIDE - 1), fill=(255, 255, 255))
    return np.asarray(sheet, np.float32).reshape(-1) / np.float32(255)


def _colour(genre: str) -> tuple[int, int, int]:
    hashed = int(hash_strings([genre])[0])
    red, green, blue = colorsys.hsv_to_rgb(hashed % 360 / 360, 0.5 + hashed // 360 % 2 / 2, 1.0)
    return round(255 * red), round(255 * green), round(255 * blue)
