"""Data of ``geartrain quickstart --small``: invented signs, drawn here as PNG files, without a download."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from geartrain.ams.values.errors import ConfigError
from geartrain.workers.atomic import replacing_folder

NUM_SIGNS, IMAGES_OF_EACH = 200, 15
_SIDE, _OVERSAMPLING = 32, 3
_MARKER = ".drawn-by-geartrain"
_STROKES = (3, 4, 5)
_WOBBLE, _TURN_DEGREES, _STRETCH = 0.045, 20.0, 0.2
"""Differences between writers: standard deviations, of points as part of the side."""


def drawn_signs(folder: Path, *, seed: int = 0) -> Path:
    """Draw the signs, one sub-folder of pictures for each, unless they exist; return ``folder``.

    Raises ConfigError if something else is there.
    """
    if folder.exists():
        if not (folder / _MARKER).exists():
            raise ConfigError(f"{folder} is there and holds no drawn signs; move it away, or choose another --out")
        return folder
    with replacing_folder(folder) as staging:
        for sign in range(NUM_SIGNS):
            place = staging / f"sign-{sign:03}"
            place.mkdir()
            for number, picture in enumerate(_pictures(sign, seed)):
                picture.save(place / f"{number}.png")
        (staging / _MARKER).touch()
    return folder


def _pictures(sign: int, seed: int) -> list[Image.Image]:
    random = np.random.default_rng((seed, sign))
    strokes = [random.uniform(0.12, 0.88, (3, 2)) for _ in range(random.choice(_STROKES))]
    return [_picture(strokes, random) for _ in range(IMAGES_OF_EACH)]


def _picture(strokes: list[np.ndarray], random: np.random.Generator) -> Image.Image:
    side = _SIDE * _OVERSAMPLING
    sheet = Image.new("L", (side, side), 255)
    pen, width = ImageDraw.Draw(sheet), int(random.integers(2, 5)) * _OVERSAMPLING * 2 // 3
    angle = np.deg2rad(random.normal(0, _TURN_DEGREES))
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    turn = turn * (1 + random.normal(0, _STRETCH, 2))
    along = np.linspace(0, 1, 12)[:, None]
    for points in strokes:
        first, middle, last = (points - 0.5 + random.normal(0, _WOBBLE, (3, 2))) @ turn + 0.5
        curve = (1 - along) ** 2 * first + 2 * along * (1 - along) * middle + along**2 * last
        pen.line([tuple(point) for point in (curve * side).tolist()], fill=0, width=width, joint="curve")
    return sheet.resize((_SIDE, _SIDE), Image.Resampling.BOX)
