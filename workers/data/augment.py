"""Random small distortions of a batch, a function of (seed, step), the same in every run and after a resume.

Legend: B batch, K channels, S side.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn import functional

from geartrain.ams.values.errors import InvalidArgument

_GRID = 5


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Standard deviations of the distortions, as parts of half the image's side."""

    affine: float = 0.04
    """Deviation of the four coefficients of the linear map: scale, shear and slant."""
    shift: float = 0.03
    """Deviation of the two coordinates of the centre."""
    elastic: float = 0.06
    """Deviation of a smooth displacement field: parts of a character move by themselves, as between type designs."""
    colour: float = 0.0
    """Deviation of the contrast's factor and of the brightness, as a part of the whole range; for each image."""
    flip: float = 0.0
    """Share of mirrored images: 0.5 where left and right mean nothing (not for characters)."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 <= value <= 1:
                raise InvalidArgument(f"{name} is {value!r}; it must lie in [0, 1]")

    def distort(self, images: Tensor, first: int, joint_batch: int, seed: int, step: int) -> Tensor:
        """Distort images [B, K, S, S] float, which begin at ``first`` in a joint batch of all ranks.

        Random numbers are drawn for the joint batch, so that the images do not depend on the number of ranks.
        """
        generator = torch.Generator().manual_seed((seed * 1_000_003 + step) ^ 0x5EED)
        own = slice(first, first + len(images))
        linear = torch.randn(joint_batch, 2, 2, generator=generator)[own] * self.affine + torch.eye(2)
        shift = torch.randn(joint_batch, 2, 1, generator=generator)[own] * self.shift
        bend = torch.randn(joint_batch, 2, _GRID, _GRID, generator=generator)[own] * self.elastic
        if self.flip:  # drawn after the others, which are so the same without it
            mirrored = torch.rand(joint_batch, generator=generator)[own] < self.flip
            linear[:, 0, :] *= torch.where(mirrored, -1.0, 1.0)[:, None]
        maps = torch.cat([linear, shift], dim=2).to(images.device)
        grid = functional.affine_grid(maps, list(images.shape), align_corners=False)
        field = functional.interpolate(
            bend.to(images.device), size=images.shape[2:], mode="bilinear", align_corners=True
        )
        moved: Tensor = functional.grid_sample(
            images, grid + field.permute(0, 2, 3, 1), align_corners=False, padding_mode="border"
        )
        if not self.colour:
            return moved
        size = (self.colour * torch.randn(2, joint_batch, 1, 1, 1, generator=generator)[:, own]).to(images.device)
        mean = moved.mean(dim=(1, 2, 3), keepdim=True)
        return torch.clamp(mean + (moved - mean) * (1 + size[0]) + size[1], 0, 1)
