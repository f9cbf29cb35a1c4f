"""A set of labelled bitmaps, and the batches of a training run.

Legend: N images, B batch, K channels, S side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ImageSet:
    """Bitmaps of equal size in host memory, with their classes."""

    bitmaps: Tensor
    """[N, K, S, S] uint8."""
    labels: Tensor
    """[N] int64."""

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """All images once, in order: bitmaps [B, K, S, S] uint8 on ``device`` and labels [B] on the host."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            yield self.bitmaps[part].to(device), self.labels[part]

    def part(self, rank: int, world_size: int) -> ImageSet:
        """Every ``world_size``-th image, from ``rank`` on."""
        return ImageSet(self.bitmaps[rank::world_size], self.labels[rank::world_size])


class BatchOrder:
    """Which images make up the batch of a step: a function of (seed, step) alone, so that a resumed run goes on.

    Every epoch is a new permutation of all images; a batch may run over from one into the next.
    """

    def __init__(self, num_images: int, batch_size: int, seed: int) -> None:
        self._num_images = num_images
        self._batch_size = batch_size
        self._seed = seed
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def indices(self, step: int) -> Tensor:
        """Indices [B] of the images of ``step``, from 0."""
        position, end = step * self._batch_size, (step + 1) * self._batch_size
        parts = []
        while position < end:
            epoch, start = divmod(position, self._num_images)
            stop = min(self._num_images, start + end - position)
            parts.append(self._permutation(epoch)[start:stop])
            position += stop - start
        return torch.cat(parts)

    def _permutation(self, epoch: int) -> Tensor:
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._order = torch.randperm(self._num_images, generator=generator)
            self._epoch = epoch
        return self._order
