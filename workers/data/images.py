"""Sets of labelled bitmaps, in memory or decoded when they are read.

Legend: N images, B batch, K channels, S side.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument
from geartrain.workers.data.bitmaps import Bitmap, Preprocessing
from geartrain.workers.data.pictures import Picture


class Images(ABC):
    """Labelled bitmaps of equal size."""

    labels: Tensor
    """[N] int64."""
    reads_slowly: bool
    """Whether the next batch should be read while the model computes."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return bitmaps [B, K, S, S] uint8 and labels [B] of ``indices`` [B] int64."""

    @abstractmethod
    def subset(self, part: slice) -> Self:
        """Return the images of the slice."""

    def batches(self, size: int, device: torch.device) -> Batches:
        """Return all images in order, to be read any number of times: bitmaps [B, K, S, S] uint8 on ``device``, labels
        [B] on the host."""
        return Batches(self, size, device)

    def part(self, rank: int, world_size: int) -> Self:
        """Return every ``world_size``-th image, from ``rank`` on."""
        return self.subset(slice(rank, None, world_size))


@dataclass(frozen=True)
class ImageSet(Images):
    """Bitmaps in host memory."""

    bitmaps: Tensor
    """[N, K, S, S] uint8."""
    labels: Tensor
    """[N] int64."""
    reads_slowly = False

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.bitmaps[indices], self.labels[indices]

    def subset(self, part: slice) -> ImageSet:
        """Return the images of the slice, without a copy."""
        return ImageSet(self.bitmaps[part], self.labels[part])


class StreamedImages(Images):
    """Pictures on disk, each decoded on demand, by as many threads as cores.

    Memory: the list of pictures, 8 bytes a label, and the batches being read.
    """

    reads_slowly = True

    def __init__(
        self, pictures: Sequence[Picture], labels: Tensor, preprocessing: Preprocessing, unreadable: Unreadable
    ) -> None:
        """``pictures`` and ``labels`` [N] int64 match by position; ``unreadable`` records broken ones."""
        self.labels = labels
        self._pictures = pictures
        self._preprocessing = preprocessing
        self._unreadable = unreadable
        self._pool = ThreadPoolExecutor(decoding_threads(), thread_name_prefix="decode")

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return a batch; a broken picture, if skipped, is replaced by the one before it.

        Otherwise, or if all of them are broken, raises InvalidArgument naming the picture.
        """
        chosen = [self._pictures[index] for index in indices.tolist()]
        read = list(self._pool.map(self._read, chosen))
        sound = [place for place, bitmap in enumerate(read) if bitmap is not None]
        if not sound:
            raise InvalidArgument(
                f"none of {len(read)} pictures in a row can be read, the first is {chosen[0].where}; replace or remove "
                "them"
            )
        standing_in = np.maximum(np.searchsorted(sound, np.arange(len(read)), side="right") - 1, 0)
        kept = [sound[place] for place in standing_in]
        bitmaps = torch.from_numpy(np.stack([read[place] for place in kept]))
        return bitmaps, self.labels[indices[torch.tensor(kept)]]

    def subset(self, part: slice) -> StreamedImages:
        return StreamedImages(self._pictures[part], self.labels[part], self._preprocessing, self._unreadable)

    def _read(self, picture: Picture) -> Bitmap | None:
        return read_bitmap(picture, self._preprocessing, self._unreadable)


class Unreadable:
    """Record of broken pictures: each is refused at once, or skipped and counted."""

    def __init__(self, *, skip: bool) -> None:
        self.skip = skip
        self.found: dict[str, str] = {}
        """Error by place of the picture."""

    def record(self, where: str, error: InvalidArgument) -> None:
        """Record a broken picture. Raises InvalidArgument, with the remedy, unless they are skipped."""
        text = str(error) if where in str(error) else f"{where}: {error}"
        self.found[where] = text
        if not self.skip:
            raise InvalidArgument(f"{text}; --set skip_unreadable=true trains without it") from error


def read_bitmap(picture: Picture, preprocessing: Preprocessing, unreadable: Unreadable) -> Bitmap | None:
    """Return the bitmap [K, S, S] of a picture; None if it is broken and skipped. Raises InvalidArgument."""
    try:
        return preprocessing.bitmap(picture.open())
    except InvalidArgument as error:
        unreadable.record(picture.where, error)
        return None


def decoding_threads() -> int:
    """Return the number of decoding threads: the usable cores, divided among the ranks of this machine."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


class ReadAhead:
    """Batches by number, in order: the next one is read while one is in use.

    At most two are in memory. Images in memory are not read ahead.
    """

    def __init__(self, images: Images, indices: Callable[[int], Tensor | None]) -> None:
        """``indices`` returns those of a batch by its number, None beyond the last."""
        self._images = images
        self._indices = indices
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="read-ahead") if images.reads_slowly else None
        self._next: tuple[int, Future[tuple[Tensor, Tensor]]] | None = None

    def take(self, number: int) -> tuple[Tensor, Tensor]:
        ahead, self._next = self._next, None
        if ahead is not None and ahead[0] == number:
            batch = ahead[1].result()
        else:
            indices = self._indices(number)
            if indices is None:
                raise InvalidArgument(f"there is no batch {number}")
            batch = self._images.take(indices)
        if self._pool is not None and (following := self._indices(number + 1)) is not None:
            self._next = number + 1, self._pool.submit(self._images.take, following)
        return batch


@dataclass(frozen=True)
class Batches:
    """Batches of a set, in order. A class head with many classes reads them several times."""

    images: Images
    size: int
    device: torch.device

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        reader = ReadAhead(self.images, self._indices)
        for number in range(-(-len(self.images) // self.size)):
            bitmaps, labels = reader.take(number)
            yield bitmaps.to(self.device), labels

    def _indices(self, number: int) -> Tensor | None:
        start, stop = number * self.size, min((number + 1) * self.size, len(self.images))
        return torch.arange(start, stop) if start < stop else None
