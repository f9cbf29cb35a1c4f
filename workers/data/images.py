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
    """Whether it is worth reading a batch while the one before is worked on."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Bitmaps [B, K, S, S] uint8 and labels [B] of ``indices`` [B] int64."""

    @abstractmethod
    def subset(self, part: slice) -> Self:
        """The images of the slice."""

    def batches(self, size: int, device: torch.device) -> Batches:
        """All images in order, as often as they are read: bitmaps [B, K, S, S] uint8 on ``device``, labels [B] here."""
        return Batches(self, size, device)

    def part(self, rank: int, world_size: int) -> Self:
        """Every ``world_size``-th image, from ``rank`` on."""
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
        """See :meth:`Images.subset`; without a copy."""
        return ImageSet(self.bitmaps[part], self.labels[part])


class StreamedImages(Images):
    """Pictures that stay on the disk: each is decoded when it is asked for, by as many threads as there are cores.

    Memory: the list of pictures, 8 bytes a label, and the batches being read.
    """

    reads_slowly = True

    def __init__(
        self, pictures: Sequence[Picture], labels: Tensor, preprocessing: Preprocessing, unreadable: Unreadable
    ) -> None:
        """``pictures`` and ``labels`` [N] int64 belong together; see :class:`Unreadable` for those that are broken."""
        self.labels = labels
        self._pictures = pictures
        self._preprocessing = preprocessing
        self._unreadable = unreadable
        self._pool = ThreadPoolExecutor(decoding_threads(), thread_name_prefix="decode")

    def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`Images.take`. In the place of a broken picture, if those are passed over, the one before it.

        Raises InvalidArgument naming the picture otherwise, or if all of them are broken.
        """
        chosen = [self._pictures[index] for index in indices.tolist()]
        read = list(self._pool.map(self._read, chosen))
        sound = [place for place, bitmap in enumerate(read) if bitmap is not None]
        if not sound:
            raise InvalidArgument(f"none of {len(read)} pictures in a row can be read, the first is {chosen[0].where}")
        standing_in = np.maximum(np.searchsorted(sound, np.arange(len(read)), side="right") - 1, 0)
        kept = [sound[place] for place in standing_in]
        bitmaps = torch.from_numpy(np.stack([read[place] for place in kept]))
        return bitmaps, self.labels[indices[torch.tensor(kept)]]

    def subset(self, part: slice) -> StreamedImages:
        return StreamedImages(self._pictures[part], self.labels[part], self._preprocessing, self._unreadable)

    def _read(self, picture: Picture) -> Bitmap | None:
        return read_bitmap(picture, self._preprocessing, self._unreadable)


class Unreadable:
    """The broken pictures that were met: refused when one is met, or passed over and counted."""

    def __init__(self, *, skip: bool) -> None:
        self.skip = skip
        self.found: dict[str, str] = {}
        """Where a picture is -> what is wrong with it."""

    def record(self, where: str, error: InvalidArgument) -> None:
        """Note a broken picture. Raises InvalidArgument, with the remedy, unless they are passed over."""
        text = str(error) if where in str(error) else f"{where}: {error}"
        self.found[where] = text
        if not self.skip:
            raise InvalidArgument(f"{text}; --set skip_unreadable=true trains without it") from error


def read_bitmap(picture: Picture, preprocessing: Preprocessing, unreadable: Unreadable) -> Bitmap | None:
    """The bitmap [K, S, S] of a picture; None if it is broken and passed over. Raises InvalidArgument."""
    try:
        return preprocessing.bitmap(picture.open())
    except InvalidArgument as error:
        unreadable.record(picture.where, error)
        return None


def decoding_threads() -> int:
    """Threads of this process that decode: the cores it may use, shared out among the ranks of this machine."""
    return max(1, len(os.sched_getaffinity(0)) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


class ReadAhead:
    """Batches by number, asked for one after the other: while one is worked on the next is read.

    So at most two are in memory. Of images in memory none is read ahead.
    """

    def __init__(self, images: Images, indices: Callable[[int], Tensor | None]) -> None:
        """``indices`` gives those of a batch by its number, None beyond the last."""
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
    """The batches of a set, in order. A class head with many classes reads them several times."""

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
