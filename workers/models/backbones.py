"""Backbones: networks from bitmaps to features, registered by name so that a saved model can be rebuilt.

Legend: B batch, K channels, S side of a bitmap, M maps of the stem, D width of a feature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from geartrain.ams.values.errors import ConfigError
from geartrain.workers.models.iresnet import STAGES, IResNet
from geartrain.workers.models.networks import TIMM, FromBitmaps, build_own, build_timm

DIRECTIONS = 8
CELLS = 8
"""Cells per side: the stem divides an image into 8 x 8 cells."""
_SQRT_FLOOR = 1e-4


class GradientStem(nn.Module):
    """Edge strengths in 8 directions, in each of 8 x 8 overlapping cells; without trained parameters.

    The classic descriptor of characters (Kimura 1987; Dalal and Triggs 2005). It smooths the image gradient, takes its
    positive part along each direction, pools it over each cell, and takes the square root. For colour images it adds
    the mean colour of each cell; the gradient maps are per channel.
    """

    def __init__(self, channels: int, image_size: int) -> None:
        super().__init__()
        self.channels = channels
        self.stride = image_size // CELLS
        angles = torch.arange(DIRECTIONS) * (2 * math.pi / DIRECTIONS)
        across = torch.zeros(1, 1, 3, 3)
        across[0, 0, 1, 2], across[0, 0, 1, 0] = 1.0, -1.0
        down = across.transpose(2, 3)
        smooth = torch.full((1, 1, 3, 3), 1 / 9)
        kernels = [functional.conv_transpose2d(a.cos() * across + a.sin() * down, smooth) for a in angles]
        self.edges: Tensor
        self.register_buffer("edges", torch.cat(kernels).repeat(channels, 1, 1, 1), persistent=False)
        self.window: Tensor
        self.register_buffer("window", self._window(), persistent=False)

    def _window(self) -> Tensor:
        """Return a cell's weights: a trapezoid over one and a half cells, so that neighbours overlap."""
        box, overlap = torch.ones(1, 1, self.stride), torch.ones(1, 1, self.stride // 2 + 1)
        side = functional.conv_transpose1d(box, overlap)[0, 0]
        side = side / side.sum()
        return (side[:, None] * side[None, :]).expand(self.channels * DIRECTIONS, 1, -1, -1).contiguous()

    @property
    def num_maps(self) -> int:
        """Number of output maps, M."""
        return self.channels * DIRECTIONS + (self.channels if self.channels > 1 else 0)

    def forward(self, images: Tensor) -> Tensor:
        """Return the maps [B, M, 8, 8] of images [B, K, S, S] in [0, 1]."""
        # channels_last makes the depthwise convolution ten times faster on a CPU.
        edges = functional.conv2d(
            images.contiguous(memory_format=torch.channels_last), self.edges, padding=2, groups=self.channels
        )
        cells = functional.conv2d(
            edges.relu(), self.window, stride=self.stride, padding=(self.stride // 2 + 1) // 2, groups=edges.shape[1]
        )
        maps = (cells + _SQRT_FLOOR).sqrt()
        if self.channels > 1:
            maps = torch.cat([maps, functional.avg_pool2d(images, self.stride)], dim=1)
        return maps.contiguous()


class StrokeNet(nn.Module):
    """Sum of a linear projection of the gradient stem and the output of a small convolutional trunk.

    The trunk's last layer starts at zero, so training starts from a projection solved in closed form
    (``discriminants.py``), and the trunk learns what a projection cannot express. GroupNorm keeps samples independent:
    features are the same for any split of a batch over ranks.
    """

    def __init__(self, *, channels: int = 1, image_size: int = 32, dim: int = 128, width: int = 64) -> None:
        super().__init__()
        self.stem = GradientStem(channels, image_size)
        maps = self.stem.num_maps
        self.projection = nn.Linear(maps * CELLS * CELLS, dim)
        self.trunk = nn.Sequential(
            *_block(maps, width, 1), *_block(width, width, 1), *_block(width, width, 2), nn.Flatten()
        )
        self.addition = nn.Linear(width * (CELLS // 2) ** 2, dim)
        nn.init.zeros_(self.addition.weight)
        nn.init.zeros_(self.addition.bias)

    def descriptors(self, bitmaps: Tensor) -> Tensor:
        """Return the projection's input [B, M·64] of bitmaps [B, K, S, S] (uint8, or float in [0, 1])."""
        return self._maps(bitmaps).flatten(1)

    def forward(self, bitmaps: Tensor) -> Tensor:
        """Return features [B, D] of bitmaps [B, K, S, S] (uint8, or float in [0, 1])."""
        maps = self._maps(bitmaps)
        features: Tensor = self.projection(maps.flatten(1)) + self.addition(self.trunk(maps))
        return features

    def _maps(self, bitmaps: Tensor) -> Tensor:
        images = bitmaps.float().div(255) if bitmaps.dtype == torch.uint8 else bitmaps
        with torch.no_grad():
            maps: Tensor = self.stem(images)
        return maps


class ProjectedFeatures(nn.Module):
    """Features of a backbone without its trunk: the projection of the descriptors only."""

    def __init__(self, backbone: StrokeNet) -> None:
        super().__init__()
        self.backbone = backbone

    def forward(self, bitmaps: Tensor) -> Tensor:
        """Return features [B, D] of bitmaps [B, K, S, S]."""
        features: Tensor = self.backbone.projection(self.backbone.descriptors(bitmaps))
        return features


def _iresnet(units: tuple[int, ...], **settings: Any) -> nn.Module:
    return FromBitmaps(IResNet(units, **settings), centred=True)


def _block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.GroupNorm(8, outputs),
        nn.ReLU(inplace=True),
    ]


BACKBONES: Mapping[str, Callable[..., nn.Module]] = {
    "stroke_net": StrokeNet,
    **{name: partial(_iresnet, units) for name, units in STAGES.items()},
}
"""Constructors by name; each takes ``channels``, ``image_size`` and ``dim``."""


def build_backbone(name: str, settings: Mapping[str, Any], *, own: str | None = None) -> nn.Module:
    """Return the backbone ``name`` with its constructor's ``settings``: bitmaps [B, K, S, S] -> features [B, D].

    Names are those of :data:`BACKBONES`, ``timm:NAME``, and ``package.module:function``. The last is user code, which
    is imported only if the user named it, too, as ``own``. Raises ConfigError.
    """
    if name.startswith(TIMM):
        return build_timm(name.removeprefix(TIMM), **settings)
    if ":" in name:
        if name != own:
            raise ConfigError(
                f"the backbone is {name}, code that is not Geartrain's; if you trust it, say so: --backbone {name}, "
                f"or --set backbone={name} of 'geartrain worker'"
            )
        return build_own(name, **settings)
    if name not in BACKBONES:
        raise ConfigError(
            f"the backbone {name!r} is unknown; there are: {', '.join(BACKBONES)}, {TIMM}NAME, and "
            "package.module:function of your own"
        )
    try:
        return BACKBONES[name](**settings)
    except TypeError as exc:
        raise ConfigError(f"the backbone {name!r} does not take the settings {dict(settings)!r}: {exc}") from exc
