"""A person's own images, read into memory and split: a folder with one sub-folder per class, or an archive of them.

Legend: K channels, S side.
"""

from __future__ import annotations

import functools
import os
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import counted
from geartrain.workers.data import recordio, webdataset
from geartrain.workers.data.bitmaps import IMAGE_SUFFIXES, Bitmap, Preprocessing, open_picture
from geartrain.workers.data.images import ImageSet
from geartrain.workers.data.pictures import Picture

_BAD_FILES_NAMED = 5


@dataclass(frozen=True)
class FolderData:
    """Images of a folder or an archive, split."""

    class_names: list[str]
    """Names of the sub-folders, sorted; of an archive its labels, rising."""
    train: ImageSet
    validation: ImageSet
    """The part held out; may be empty."""


def load_folder(
    folder: Path, preprocessing: Preprocessing, *, held_out: float, seed: int, console: Console
) -> FolderData:
    """Read all images of ``folder`` into memory; of each class the part ``held_out`` is kept for validation.

    What it is decides who reads it: sub-folders of images (:func:`find_classes`), WebDataset shards
    (:mod:`.webdataset`), or a RecordIO file or a folder with one (:mod:`.recordio`). Raises InvalidArgument naming the
    folder or the files that cannot be used.
    """
    if not 0 <= held_out < 1:
        raise InvalidArgument(f"the held-out part is {held_out!r}; it must lie in [0, 1)")
    classes = find_pictures(folder)
    train, validation = [], []
    for label, files in enumerate(classes.values()):
        kept = list(files)
        random.Random(f"{seed}/{label}").shuffle(kept)
        count = min(len(kept) - 1, round(held_out * len(kept)))
        validation += [(picture, label) for picture in kept[:count]]
        train += [(picture, label) for picture in kept[count:]]
    bitmaps = _read_all([picture for picture, _ in train + validation], preprocessing, console)
    split = len(train)
    return FolderData(
        class_names=list(classes),
        train=_image_set(bitmaps[:split], [label for _, label in train]),
        validation=_image_set(bitmaps[split:], [label for _, label in validation]),
    )


def find_pictures(data: Path) -> dict[str, list[Picture]]:
    """Class name -> its pictures, of whatever kind ``data`` is. Raises InvalidArgument."""
    if not data.is_dir() or not any(entry.is_dir() and not entry.name.startswith(".") for entry in data.iterdir()):
        if shards := webdataset.shards_of(data):
            return webdataset.read_shards(shards)
        if (records := recordio.records_of(data)) is not None:
            return recordio.read_records(records)
    return {
        name: [Picture(str(path), functools.partial(open_picture, path)) for path in files]
        for name, files in find_classes(data).items()
    }


def find_classes(folder: Path) -> dict[str, list[Path]]:
    """Class name -> its image files, both sorted. Raises InvalidArgument if that is no classification data."""
    if not folder.is_dir():
        raise InvalidArgument(
            f"{folder} is not a folder; give one with a sub-folder of images for each class, "
            "WebDataset shards (*.tar), or a RecordIO file (*.rec)"
        )
    classes = {
        entry.name: sorted(path for path in entry.rglob("*") if path.suffix.lower() in IMAGE_SUFFIXES)
        for entry in sorted(folder.iterdir())
        if entry.is_dir() and not entry.name.startswith(".")
    }
    if len(classes) < 2:
        raise InvalidArgument(
            f"{folder} has {counted(len(classes), 'sub-folder')}; a classifier needs at least 2, each with the images "
            "of one class"
        )
    empty = [name for name, files in classes.items() if not files]
    if empty:
        raise InvalidArgument(
            f"{folder} has no images for {counted(len(empty), 'class', 'classes')}: "
            f"{', '.join(empty[:_BAD_FILES_NAMED])}; "
            f"remove those folders or fill them ({', '.join(sorted(IMAGE_SUFFIXES))})"
        )
    return classes


def _read_all(pictures: list[Picture], preprocessing: Preprocessing, console: Console) -> list[Bitmap]:
    """Bitmaps [K, S, S] in order. All files are tried, so that all bad ones are named at once."""
    bad: list[str] = []

    def read(picture: Picture) -> Bitmap:
        try:
            return preprocessing.bitmap(picture.open())
        except InvalidArgument as exc:
            bad.append(str(exc) if picture.where in str(exc) else f"{picture.where}: {exc}")
            return np.zeros((preprocessing.channels, preprocessing.size, preprocessing.size), np.uint8)

    with Progress(console=console, transient=True) as progress, ThreadPoolExecutor(os.cpu_count()) as pool:
        bitmaps = list(progress.track(pool.map(read, pictures), total=len(pictures), description="reading images"))
    if bad:
        more = f"; and {len(bad) - _BAD_FILES_NAMED} more" if len(bad) > _BAD_FILES_NAMED else ""
        raise InvalidArgument("; ".join(sorted(bad)[:_BAD_FILES_NAMED]) + more)
    return bitmaps


def _image_set(bitmaps: list[Bitmap], labels: list[int]) -> ImageSet:
    stacked = torch.from_numpy(np.stack(bitmaps)) if bitmaps else torch.empty(0, 1, 32, 32, dtype=torch.uint8)
    return ImageSet(stacked, torch.tensor(labels, dtype=torch.int64))
