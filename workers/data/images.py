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

    def batches(self, size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """All images once, in order: bitmaps [B, K, S, S] uint8 on ``device`` and labels [B] on the host."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            yield self.bitmaps[part].to(device), self.labels[part]

    def part(self, rank: int, world_size: int) -> ImageSet:
        """Every ``world_size``-th image, from ``rank`` on."""
        return ImageSet(self.bitmaps[rank::world_size], self.labels[rank::world_size])
