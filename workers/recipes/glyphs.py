"""Data of the quickstart: every CJK character and Hangul syllable is a class, every font face an image of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from geartrain.ams.values.errors import ConfigError
from geartrain.workers.data.images import ImageSet
from geartrain.workers.recipes.fonts import CLASSES_FACE, FACES, find_fonts
from geartrain.workers.recipes.render import RenderedFace, render_faces


@dataclass(frozen=True)
class GlyphData:
    """Training images, and test images of each family that training does not see."""

    class_names: list[str]
    """One character per class, in the order of code points."""
    train: ImageSet
    held_out: dict[str, ImageSet]
    """Images by family, of the classes it has."""


def load_glyphs(cache: Path, size: int, num_classes: int | None, console: Console) -> GlyphData:
    """Fetch the fonts, draw their characters, and return the images of ``num_classes`` classes (None: all)."""
    fonts = find_fonts(cache, say=lambda line: console.print(line, highlight=False))
    return assemble(render_faces(fonts, cache, size, console), num_classes)


def load_face(cache: Path, size: int, console: Console) -> RenderedFace:
    """Fetch and draw only the face whose characters are the classes: one image a class."""
    faces = [face for face in FACES if face.name == CLASSES_FACE]
    fonts = find_fonts(cache, faces, say=lambda line: console.print(line, highlight=False))
    return render_faces(fonts, cache, size, console)[0]


def assemble(faces: list[RenderedFace], num_classes: int | None) -> GlyphData:
    """Sort rendered faces into training and held-out sets, of ``num_classes`` classes evenly spread (None: all).

    Raises ConfigError if a family is on both sides or one side is empty, and if ``num_classes`` is below 2 or more than
    there are.
    """
    train = [rendered for rendered in faces if rendered.font.face.role == "train"]
    held_out = [rendered for rendered in faces if rendered.font.face.role == "held_out"]
    if not train or not held_out:
        raise ConfigError(
            f"there are {len(train)} training faces and {len(held_out)} held-out ones; give at least one of each"
        )
    both = {rendered.font.face.family for rendered in train} & {rendered.font.face.family for rendered in held_out}
    if both:
        raise ConfigError(
            f"families {sorted(both)} have faces for training and held-out ones; give all faces of a family one role"
        )
    codes = next((face.code_points for face in train if face.font.face.name == CLASSES_FACE), train[0].code_points)
    if num_classes is not None:
        if not 2 <= num_classes <= len(codes):
            raise ConfigError(f"the number of classes is {num_classes}; it must lie in [2, {len(codes)}]")
        codes = codes[np.arange(num_classes) * len(codes) // num_classes]
    tests = {face.font.face.family: _image_set([face], codes) for face in held_out}
    return GlyphData(
        class_names=[chr(code) for code in codes.tolist()],
        train=_image_set(train, codes),
        held_out={family: images for family, images in tests.items() if len(images)},
    )


def _image_set(faces: list[RenderedFace], codes: np.ndarray) -> ImageSet:
    """Return the images of ``faces`` whose character is a class, face after face."""
    bitmaps, labels = [], []
    for rendered in faces:
        place = np.searchsorted(codes, rendered.code_points)
        known = codes[np.minimum(place, len(codes) - 1)] == rendered.code_points
        bitmaps.append(np.ascontiguousarray(rendered.bitmaps[known]))
        labels.append(place[known])
    return ImageSet(
        torch.from_numpy(np.concatenate(bitmaps)).unsqueeze(1),
        torch.from_numpy(np.concatenate(labels).astype(np.int64)),
    )
