"""Images cut in two: the top half for the fast gear, the bottom half for the slow one (the paper's experiment).

What the top half leaves open only the bottom half can tell, so a classifier needs both gears; every pass over the
images asks for each bottom half again, so their ids recur.

Legend: N images, B batch, K channels, S side of an image.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument, SampleNotFound
from geartrain.workers.data.images import ImageSet
from geartrain.workers.recipes.glyphs import load_glyphs


@dataclass(frozen=True)
class HalfBatch:
    """Part of a batch that a fast gear reads: the top halves, and the ids of the bottom halves."""

    tops: Tensor
    """[B, K, S/2, S] uint8."""
    image_ids: Tensor
    """[B] int64, distinct."""
    labels: Tensor
    """[B] int64."""


@dataclass(frozen=True)
class Halves:
    """Images of which each gear sees one half; the id of image n is ``first_id + n``."""

    tops: Tensor
    """[N, K, S/2, S] uint8."""
    bottoms: Tensor
    """[N, K, S/2, S] uint8."""
    labels: Tensor
    """[N] int64."""
    first_id: int = 0
    """So that several sets, such as training and test, share one space of ids."""

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, size: int, *, seed: int, passes: int = 1) -> Iterator[HalfBatch]:
        """Batches of ``size`` in a new order for each pass over the images; what is left over of a pass is left out.

        Raises InvalidArgument if there are fewer images.
        """
        if not 1 <= size <= len(self):
            raise InvalidArgument(f"the batch size is {size!r}; it must lie in [1, {len(self)}], the number of images")
        for number in range(passes):
            order = torch.from_numpy(np.random.default_rng((seed, number)).permutation(len(self)))
            for start in range(0, len(self) - size + 1, size):
                yield self.rows(order[start : start + size])

    def in_order(self, size: int) -> Iterator[HalfBatch]:
        """All images once, the last batch perhaps smaller; for testing."""
        for start in range(0, len(self), size):
            yield self.rows(torch.arange(start, min(start + size, len(self))))

    def rows(self, rows: Tensor) -> HalfBatch:
        """Return the batch of the images ``rows`` [B]."""
        return HalfBatch(self.tops[rows], rows + self.first_id, self.labels[rows])

    def bottom(self, image_id: int) -> Tensor:
        """Return an image's bottom half, for the slow gear: float32 [K, S/2, S] in [0, 1]. Raises SampleNotFound."""
        row = image_id - self.first_id
        if not 0 <= row < len(self):
            last = self.first_id + len(self)
            raise SampleNotFound(f"there is no image {image_id}; the ids of images lie in [{self.first_id}, {last})")
        return self.bottoms[row].float() / 255


@dataclass(frozen=True)
class HalvedData:
    """A classification task of halves."""

    num_classes: int
    train: Halves
    tests: dict[str, Halves]
    """Name -> images that training does not see; their ids follow those before."""

    def bottom(self, image_id: int) -> Tensor:
        """The bottom half of any image of the task, as :meth:`Halves.bottom`."""
        for part in (self.train, *self.tests.values()):
            if part.first_id <= image_id < part.first_id + len(part):
                return part.bottom(image_id)
        total = len(self.train) + sum(map(len, self.tests.values()))
        raise SampleNotFound(f"there is no image {image_id}; the ids of images lie in [0, {total})")


def halve(images: ImageSet, first_id: int = 0) -> Halves:
    """Cut every image of the set in the middle. Raises InvalidArgument if the height is odd."""
    height = images.bitmaps.shape[2]
    if height % 2:
        raise InvalidArgument(f"the images are {height} pixels high; halves need an even height")
    tops, bottoms = images.bitmaps[:, :, : height // 2], images.bitmaps[:, :, height // 2 :]
    return Halves(tops.contiguous(), bottoms.contiguous(), images.labels, first_id)


def halve_task(num_classes: int, train: ImageSet, tests: dict[str, ImageSet]) -> HalvedData:
    """Halves of a training set and of the sets to test on, in one space of ids."""
    first_id, halved = len(train), {}
    for name, images in tests.items():
        halved[name] = halve(images, first_id)
        first_id += len(images)
    return HalvedData(num_classes, halve(train), halved)


def load_glyph_halves(cache: Path, console: Console, *, num_classes: int = 1000, size: int = 32) -> HalvedData:
    """The quickstart's glyphs, halved: ``num_classes`` characters, evenly spread, six images of each to train on.

    The tests are families of fonts that training does not see. Fetches and draws as
    :func:`geartrain.workers.recipes.glyphs.load_glyphs`.
    """
    data = load_glyphs(cache, size, num_classes, console)
    return halve_task(len(data.class_names), data.train, data.held_out)
