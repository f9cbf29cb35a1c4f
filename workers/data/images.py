"""A set of labelled bitmaps.

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

    def batches(self, size: int, device: torch.device) -> Batches:
        """All images in order, as often as they are read: bitmaps [B, K, S, S] uint8 on ``device``, labels [B] here."""
        return Batches(self, size, device)

    def part(self, rank: int, world_size: int) -> ImageSet:
        """Every ``world_size``-th image, from ``rank`` on."""
        return ImageSet(self.bitmaps[rank::world_size], self.labels[rank::world_size])


@dataclass(frozen=True)
class Batches:
    """The batches of a set, in order. A class head with many classes reads them several times."""

    images: ImageSet
    size: int
    device: torch.device

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self.images), self.size):
            part = slice(start, start + self.size)
            yield self.images.bitmaps[part].to(self.device), self.images.labels[part]
