"""Images of items by their ids, and posters of films.

MovieLens-100K has no pictures that may be fetched. Posters are drawn from genres and year, so that like films look
alike: they hold nothing that the ids do not, and show that images of items train beside ids.
"""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.specs import Ids
from geartrain.ams.values.strings import hash_strings

SIDE = 12
"""Pixels of a side."""
_FIRST_YEAR, _YEARS = 1920, 80


@dataclass(frozen=True)
class ItemImages:
    """An image for each of K items."""

    items: Ids
    """[K], ascending."""
    pixels: npt.NDArray[np.float32]
    """[K, P], one image a row, in [0, 1]."""

    @property
    def dim(self) -> int:
        """Numbers of an image (P)."""
        return int(self.pixels.shape[1])

    def of(self, ids: Ids) -> npt.NDArray[np.float32]:
        """Return the images [B, P] of the items ``ids`` [B]. Raises ConfigError that names an item without one."""
        places = np.minimum(np.searchsorted(self.items, ids), len(self.items) - 1)
        missing = np.flatnonzero(self.items[places] != ids)
        if len(missing):
            raise ConfigError(f"item {ids[missing[0]]} has no image; give every item one")
        return self.pixels[places]


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
