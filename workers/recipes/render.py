"""Renderer of a font's characters to bitmaps, on all cores, with a cache.

Legend: N characters, S side of a bitmap.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import PIL
from fontTools.ttLib import TTFont
from PIL import ImageFont
from rich.console import Console
from rich.progress import Progress

from geartrain.ams.values.errors import ConfigError
from geartrain.workers.atomic import replacing, write_json
from geartrain.workers.data.bitmaps import Bitmap, crop_ink
from geartrain.workers.recipes.fonts import FontFile

RENDERING_VERSION = 1
"""Raised when the same font and size would give other bitmaps; part of the cache's key."""
EM_PIXELS = 56
"""Size at which outlines are drawn before the ink is scaled down to the bitmap."""
CHARACTERS_PER_TASK = 1000
CODE_POINTS = ((0x3400, 0x9FFF), (0xAC00, 0xD7A3), (0x20000, 0x2FFFF))
"""CJK characters and Hangul syllables: first and last of each range."""
_UNASSIGNED = chr(0x10FFFE)


@dataclass(frozen=True)
class RenderedFace:
    """The bitmaps of one face, mapped from the cache."""

    font: FontFile
    bitmaps: Bitmap
    """[N, S, S], ink bright."""
    code_points: npt.NDArray[np.int64]
    """[N], ascending."""


def render_faces(fonts: list[FontFile], cache: Path, size: int, console: Console) -> list[RenderedFace]:
    """Return the bitmaps of all usable characters of each face; draw those missing in ``cache``.

    A character is usable if its outline leaves ink and is not the font's sign for a missing one. Raises ConfigError
    if a font cannot be read.
    """
    folders = [cache / "bitmaps" / f"{font.face.name}-{_key(font, size)}" for font in fonts]
    pairs = zip(fonts, folders, strict=True)
    missing = [(font, folder) for font, folder in pairs if not (folder / "manifest.json").exists()]
    if missing:
        context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with ProcessPoolExecutor(workers, mp_context=context) as pool, Progress(console=console) as progress:
            for font, folder in missing:
                characters = characters_of(font)
                task = progress.add_task(f"drawing {font.face.name}", total=len(characters))
                results = []
                for bitmaps, usable in pool.map(draw_characters, *_tasks(font, characters, size)):
                    results.append((bitmaps, usable))
                    progress.advance(task, len(usable))
                _write_images(folder, font, size, characters, results)
    return [_open(font, folder) for font, folder in zip(fonts, folders, strict=True)]


def characters_of(font: FontFile) -> list[int]:
    """Return code points of the wanted ranges that the font maps to a glyph, ascending; some may still be blank."""
    try:
        with TTFont(font.path, fontNumber=font.index, lazy=True) as opened:
            mapping = opened.getBestCmap()
            if mapping is None:
                raise ValueError("it maps no characters")
    except Exception as exc:  # fontTools raises errors of many unrelated kinds on a damaged file
        raise ConfigError(f"{font.path} is not a readable font ({exc}); remove it and run again") from exc
    return sorted(
        code for code, glyph in mapping.items() if glyph != ".notdef" and any(a <= code <= b for a, b in CODE_POINTS)
    )


def draw_characters(
    path: Path, index: int, characters: Iterable[int], size: int
) -> tuple[Bitmap, npt.NDArray[np.bool_]]:
    """Return bitmaps [N, S, S] of ``characters`` and whether each is usable [N]. Deterministic."""
    # BASIC layout is several times faster than shaping for single characters, and gives the same pixels.
    font = ImageFont.truetype(str(path), EM_PIXELS, index=index, layout_engine=ImageFont.Layout.BASIC)
    absent = bytes(font.getmask(_UNASSIGNED))
    codes = list(characters)
    bitmaps = np.zeros((len(codes), size, size), np.uint8)
    usable = np.zeros(len(codes), np.bool_)
    for row, code in enumerate(codes):
        mask = font.getmask(chr(code))
        pixels = bytes(mask)
        if not pixels or pixels == absent:
            continue
        width, height = mask.size
        cropped = crop_ink(np.frombuffer(pixels, np.uint8).reshape(height, width), size)
        if cropped is not None:
            bitmaps[row], usable[row] = cropped, True
    return bitmaps, usable


def _tasks(font: FontFile, characters: list[int], size: int) -> Iterator[list[object]]:
    starts = range(0, len(characters), CHARACTERS_PER_TASK)
    parts = [characters[start : start + CHARACTERS_PER_TASK] for start in starts]
    yield [font.path] * len(parts)
    yield [font.index] * len(parts)
    yield list(parts)
    yield [size] * len(parts)


def _key(font: FontFile, size: int) -> str:
    facts = [font.sha256, font.index, size, EM_PIXELS, RENDERING_VERSION, PIL.__version__, CODE_POINTS]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def _write_images(
    folder: Path,
    font: FontFile,
    size: int,
    characters: list[int],
    results: list[tuple[Bitmap, npt.NDArray[np.bool_]]],
) -> None:
    """Write the usable characters; the manifest comes last and makes the folder valid."""
    usable = np.concatenate([usable for _, usable in results])
    bitmaps = np.concatenate([bitmaps[usable] for bitmaps, usable in results])
    code_points = np.asarray(characters, np.int64)[usable]
    for name, array in (("bitmaps.npy", bitmaps), ("code_points.npy", code_points)):
        with replacing(folder / name) as temporary, temporary.open("wb") as file:
            np.save(file, array)
    manifest = {
        "face": font.face.name,
        "family": font.face.family,
        "font_sha256": font.sha256,
        "characters": len(code_points),
        "mapped": len(characters),
        "size": size,
        "em_pixels": EM_PIXELS,
        "rendering_version": RENDERING_VERSION,
        "pillow": PIL.__version__,
    }
    write_json(folder / "manifest.json", manifest)


def _open(font: FontFile, folder: Path) -> RenderedFace:
    try:
        bitmaps = np.load(folder / "bitmaps.npy", mmap_mode="r", allow_pickle=False)
        code_points = np.load(folder / "code_points.npy", allow_pickle=False)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"the cache {folder} is damaged ({exc}); remove it and run again") from exc
    if len(bitmaps) != len(code_points):
        raise ConfigError(f"the cache {folder} is damaged: its files disagree; remove it and run again")
    return RenderedFace(font, bitmaps, code_points)
