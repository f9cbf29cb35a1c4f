"""Image of hard mistakes: picture, truth, and the three best answers, each shown by its class's training image."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import Tensor

from geartrain.workers.atomic import replacing
from geartrain.workers.data.images import Images
from geartrain.workers.models.evaluate import Answers, first_images

_TILE = 104
_GAP = 12
_CAPTION = 20
_ROWS = 16
_HEADINGS = ("image", "truth", "1st", "2nd", "3rd")
_PAPER, _PEN, _RIGHT, _WRONG = (255, 255, 255), (20, 20, 20), (0, 120, 60), (180, 30, 30)
_FONT = ImageFont.load_default(size=14)


def draw_mistakes(path: Path, answers: dict[str, Answers], train: Images, class_names: list[str], *, ink: bool) -> int:
    """Write the image; return the number of mistakes in it. ``ink``: draw the bitmaps' bright ink dark."""
    shown = [(name, result, index) for name, result in answers.items() for index in result.hardest(_ROWS)]
    wanted = {int(result.images.labels[index]) for _, result, index in shown}
    wanted |= {int(label) for _, result, index in shown for label in result.classes[index, :3]}
    examples = first_images(train, wanted)
    rows = max([1, *(len(result.hardest(_ROWS)) for result in answers.values())])
    columns = max(1, len(answers))
    width = columns * (len(_HEADINGS) * (_TILE + _GAP) + 4 * _GAP)
    height = 3 * _CAPTION + rows * (_TILE + _CAPTION + _GAP)
    sheet = Image.new("RGB", (width, height), _PAPER)
    for column, (name, result) in enumerate(answers.items()):
        left = column * (width // columns) + 2 * _GAP
        _draw_column(sheet, left, f"{name}: hardest of the mistakes", result, examples, class_names, ink)
    with replacing(path) as temporary:
        sheet.save(temporary, format="PNG")
    return len(shown)


def _draw_column(
    sheet: Image.Image, left: int, title: str, result: Answers, examples: dict[int, Tensor], names: list[str], ink: bool
) -> None:
    pen = ImageDraw.Draw(sheet)
    pen.text((left, 4), title, _PEN, _FONT)
    for place, heading in enumerate(_HEADINGS):
        pen.text((left + place * (_TILE + _GAP), 4 + _CAPTION), heading, _PEN, _FONT)
    for row, index in enumerate(result.hardest(_ROWS)):
        top = 2 * _CAPTION + 8 + row * (_TILE + _CAPTION + _GAP)
        truth = int(result.images.labels[index])
        _draw_tile(sheet, left, top, result.images.take(torch.tensor([index]))[0][0], ink)
        _draw_tile(sheet, left + _TILE + _GAP, top, examples.get(truth), ink, _caption(names[truth]))
        for rank, label in enumerate(result.classes[index, :3].tolist()):
            caption = _caption(names[label], f" {float(result.scores[index, rank]):.2f}")
            colour = _RIGHT if label == truth else _WRONG
            _draw_tile(sheet, left + (rank + 2) * (_TILE + _GAP), top, examples.get(label), ink, caption, colour)


def _draw_tile(
    sheet: Image.Image,
    left: int,
    top: int,
    bitmap: Tensor | None,
    ink: bool,
    caption: str = "",
    colour: tuple[int, int, int] = _PEN,
) -> None:
    pen = ImageDraw.Draw(sheet)
    if bitmap is not None:
        array = bitmap.numpy()
        tile = Image.fromarray(array[0] if len(array) == 1 else np.ascontiguousarray(np.moveaxis(array, 0, 2)))
        tile = ImageOps.invert(tile) if ink else tile
        sheet.paste(tile.resize((_TILE, _TILE), Image.Resampling.NEAREST).convert("RGB"), (left, top))
    pen.rectangle((left - 1, top - 1, left + _TILE, top + _TILE), outline=colour)
    pen.text((left, top + _TILE + 2), caption, colour, _FONT)


def _caption(name: str, score: str = "") -> str:
    """Return a character as its code point, as the font may lack it; other names cut to the tile's width."""
    if len(name) == 1 and not name.isascii():
        return f"U+{ord(name):04X}{score}"
    fitting = (name[:end] for end in range(len(name), 0, -1) if _FONT.getlength(name[:end] + score) <= _TILE)
    return next(fitting, "") + score
