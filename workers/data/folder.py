"""A person's own images, found and split: a folder with one sub-folder per class, or an archive of them.

Legend: K channels, S side.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import counted, sized
from geartrain.workers.data import recordio, webdataset
from geartrain.workers.data.bitmaps import IMAGE_SUFFIXES, Bitmap, Preprocessing
from geartrain.workers.data.images import Images, ImageSet, StreamedImages, Unreadable, decoding_threads, read_bitmap
from geartrain.workers.data.pictures import Picture, read_file

_BAD_FILES_NAMED = 5
MEMORY_BYTES = 2 << 30
"""Most bytes of bitmaps that are kept decoded."""


@dataclass(frozen=True)
class FolderData:
    """Images of a folder or an archive, split."""

    class_names: list[str]
    """Names of the sub-folders, sorted; of an archive its labels, ascending."""
    train: Images
    validation: Images
    """Held-out part; may be empty."""
    unreadable: Unreadable
    """Skipped pictures, so far and later."""


def load_folder(
    folder: Path,
    preprocessing: Preprocessing,
    *,
    held_out: float,
    seed: int,
    console: Console,
    skip_unreadable: bool = False,
    memory_bytes: int = MEMORY_BYTES,
) -> FolderData:
    """Find the images of ``folder``; of each class the part ``held_out`` is kept for validation.

    Its contents decide on the reader: sub-folders of images (:func:`find_classes`), WebDataset shards
    (:mod:`.webdataset`), or a RecordIO file or a folder with one (:mod:`.recordio`). Bitmaps of at most
    ``memory_bytes`` in all are read now; of more, every batch is read on demand. With ``skip_unreadable`` pictures that
    cannot be read are skipped and counted, else named in the error: all of them at once if they are read now.

    The split is a function of the names, ``held_out`` and ``seed``. Raises InvalidArgument naming the folder or the
    unusable files.
    """
    if not 0 <= held_out < 1:
        raise InvalidArgument(f"the held-out part is {held_out!r}; it must lie in [0, 1)")
    classes = find_pictures(folder)
    train: list[tuple[Picture, int]] = []
    validation: list[tuple[Picture, int]] = []
    for label, files in enumerate(classes.values()):
        kept = list(files)
        random.Random(f"{seed}/{label}").shuffle(kept)
        count = min(len(kept) - 1, round(held_out * len(kept)))
        validation += [(picture, label) for picture in kept[:count]]
        train += [(picture, label) for picture in kept[count:]]
    unreadable = Unreadable(skip=skip_unreadable)
    num_bytes = (len(train) + len(validation)) * preprocessing.channels * preprocessing.size**2
    if num_bytes <= memory_bytes:
        sets = _read_all([train, validation], preprocessing, console, unreadable)
    else:
        console.print(
            f"The images decoded would take {sized(num_bytes)}: they are read batch by batch "
            "(image_memory says from when on)",
            highlight=False,
            soft_wrap=True,
        )
        sets = [_streamed(part, preprocessing, unreadable) for part in (train, validation)]
    _require_every_class(list(classes), sets[0].labels, unreadable)
    return FolderData(list(classes), sets[0], sets[1], unreadable)


def find_pictures(data: Path) -> dict[str, list[Picture]]:
    """Return the pictures of each class by name, for any kind of ``data``. Raises InvalidArgument."""
    if not data.is_dir() or not any(entry.is_dir() and not entry.name.startswith(".") for entry in data.iterdir()):
        if shards := webdataset.shards_of(data):
            return webdataset.read_shards(shards)
        if (records := recordio.records_of(data)) is not None:
            return recordio.read_records(records)
    return {name: [Picture(path, read_file) for path in files] for name, files in find_classes(data).items()}


def find_classes(folder: Path) -> dict[str, list[Path]]:
    """Return the image files of each class by name, both sorted. Raises InvalidArgument unless it is labelled data."""
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


def _read_all(
    parts: list[list[tuple[Picture, int]]], preprocessing: Preprocessing, console: Console, unreadable: Unreadable
) -> list[Images]:
    """Read each part into memory. All pictures are tried, so that all bad ones are named at once."""
    tolerant = Unreadable(skip=True)
    pictures = [picture for part in parts for picture, _ in part]

    def read(picture: Picture) -> Bitmap | None:
        return read_bitmap(picture, preprocessing, tolerant)

    bar = Progress(console=console, transient=True, disable=not console.is_terminal)  # else it prints an empty line
    with bar as progress, ThreadPoolExecutor(decoding_threads()) as pool:
        bitmaps = list(progress.track(pool.map(read, pictures), total=len(pictures), description="reading images"))
    bad = sorted(tolerant.found.values())
    if bad and not unreadable.skip:
        more = f"; and {len(bad) - _BAD_FILES_NAMED} more" if len(bad) > _BAD_FILES_NAMED else ""
        raise InvalidArgument(
            "; ".join(bad[:_BAD_FILES_NAMED]) + more + "; --set skip_unreadable=true trains without them"
        )
    unreadable.found.update(tolerant.found)
    sets: list[Images] = []
    for part in parts:
        own, bitmaps = bitmaps[: len(part)], bitmaps[len(part) :]
        labels = [label for (_, label), bitmap in zip(part, own, strict=True) if bitmap is not None]
        sets.append(_image_set([bitmap for bitmap in own if bitmap is not None], labels))
    return sets


def _streamed(part: list[tuple[Picture, int]], preprocessing: Preprocessing, unreadable: Unreadable) -> Images:
    labels = torch.tensor([label for _, label in part], dtype=torch.int64)
    return StreamedImages([picture for picture, _ in part], labels, preprocessing, unreadable)


def _require_every_class(names: list[str], labels: Tensor, unreadable: Unreadable) -> None:
    """Raise InvalidArgument if unreadable pictures left a class without a training image."""
    empty = (labels.bincount(minlength=len(names)) == 0).nonzero().squeeze(1).tolist()
    if empty:
        raise InvalidArgument(
            f"no image to train on can be read of {counted(len(empty), 'class', 'classes')}: "
            f"{', '.join(names[label] for label in empty[:_BAD_FILES_NAMED])} "
            f"({'; '.join(sorted(unreadable.found.values())[:_BAD_FILES_NAMED])}); mend or remove them"
        )


def _image_set(bitmaps: list[Bitmap], labels: list[int]) -> ImageSet:
    stacked = torch.from_numpy(np.stack(bitmaps)) if bitmaps else torch.empty(0, 1, 32, 32, dtype=torch.uint8)
    return ImageSet(stacked, torch.tensor(labels, dtype=torch.int64))
