"""Example pictures of the classes of characters and signs, for people who query a model: one of each, as in training.

A run stores them beside its model, and an export copies them. Photographs are left out, as they may show people and a
model is made to be handed on. Legend: N images, C classes, S side.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from geartrain.ams.storage.tensor_file import map_tensors
from geartrain.workers.atomic import replacing
from geartrain.workers.models.saved_model import write_arrays

FILE = "pictures.safetensors"
_PICTURES = "pictures"
_MAX_BYTES = 1 << 26

Bitmaps = npt.NDArray[np.uint8]


def write_class_pictures(
    folder: Path, names: Sequence[str], labels_N: npt.NDArray[np.int64], size: int, take: Callable[[Any], Bitmaps]
) -> None:
    """Write the first image of each class, ink bright; of one without any, nothing.

    ``take(places)`` returns images [n, 1, S, S]. Writes no file where the names are characters, which show themselves,
    or where it would be larger than 64 MiB.
    """
    if all(len(name) == 1 for name in names) or len(names) * size * size > _MAX_BYTES:
        return
    labels, places = np.unique(labels_N, return_index=True)
    pictures = np.zeros((len(names), size, size), np.uint8)
    pictures[labels] = take(places)[:, 0]
    with replacing(folder / FILE) as temporary:
        write_arrays(temporary, {_PICTURES: pictures})


def bring(run: Path, staging: Path, num_classes: int) -> None:
    """Copy a run's pictures to the export being written, if they exist and are of these classes."""
    if (run / FILE).exists() and len(map_tensors(run / FILE)[_PICTURES]) == num_classes:
        shutil.copyfile(run / FILE, staging / FILE)


class ClassPictures:
    """Pictures in the folder of a model, mapped."""

    def __init__(self, folder: Path) -> None:
        self._bitmaps_CSS: Bitmaps | None = map_tensors(folder / FILE)[_PICTURES] if (folder / FILE).exists() else None

    def __bool__(self) -> bool:
        return self._bitmaps_CSS is not None

    def png(self, label: int) -> bytes | None:
        """Return a class as a PNG file, dark ink on white; None without a picture of it."""
        if self._bitmaps_CSS is None or not 0 <= label < len(self._bitmaps_CSS) or not self._bitmaps_CSS[label].any():
            return None
        file = BytesIO()
        ImageOps.invert(Image.fromarray(self._bitmaps_CSS[label])).save(file, "PNG")
        return file.getvalue()
