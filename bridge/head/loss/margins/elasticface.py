"""ElasticFace: a margin drawn anew for each sample (Boutros et al., CVPR Workshops 2022).

Shapes: B samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from geartrain.ams.values.arguments import integer
from geartrain.bridge.head.loss.margins.angular import turned
from geartrain.bridge.head.loss.margins.margin import MarginBatch, TargetLogits
from geartrain.bridge.head.loss.margins.scale import require, require_scale, scale_of
from geartrain.bridge.kernels.philox import WORD, philox_words

_ROUNDS = 10


@dataclass(frozen=True)
class ElasticArcFace:
    """ArcFace with a random margin: z = scale · ψ(θ + m), m normal around ``margin``, drawn for each sample.

    Boutros et al., "ElasticFace: Elastic Margin Loss for Deep Face Recognition", 2022, section 3.2 (ElasticFace-Arc).
    The draw is a function of (seed, step, place in the joint batch, class): the same wherever the rows are, on any
    number of ranks, and after a restart. Outside training the margin is its mean.
    """

    scale: float | None = None
    """Multiplies every logit; > 0. None: :func:`~.scale.automatic_scale` of the head's number of classes."""
    margin: float = 0.5
    """Mean of the margins, radians in [0, π]."""
    std: float = 0.0125
    """Standard deviation of the margins; draws are clamped to [−π, π]. >= 0."""
    seed: int = 0
    """Seed of the draws, in [0, 2^64)."""

    def __post_init__(self) -> None:
        require("margin", self.margin, lambda v: 0.0 <= v <= math.pi, "an angle in [0, π] radians")
        _require_draws(self.scale, self.std, self.seed)

    def for_batch(self, batch: MarginBatch) -> DrawnArcFace:
        """Draw the margins of this batch."""
        margins_B = _drawn(self.margin, self.std, self.seed, batch)
        return DrawnArcFace(scale_of(self), margins_B.clamp(-math.pi, math.pi))


@dataclass(frozen=True)
class ElasticCosFace:
    """CosFace with a random margin: z = scale · (cos θ − m), m normal around ``margin``, drawn for each sample.

    The paper's ElasticFace-Cos; draws are those of :class:`ElasticArcFace`, unclamped.
    """

    scale: float | None = None
    """Multiplies every logit; > 0. None: :func:`~.scale.automatic_scale` of the head's number of classes."""
    margin: float = 0.35
    """Mean of the margins; >= 0."""
    std: float = 0.0125
    """Standard deviation of the margins; >= 0."""
    seed: int = 0
    """Seed of the draws, in [0, 2^64)."""

    def __post_init__(self) -> None:
        require("margin", self.margin, lambda v: 0.0 <= v < math.inf, "finite and >= 0")
        _require_draws(self.scale, self.std, self.seed)

    def for_batch(self, batch: MarginBatch) -> DrawnCosFace:
        """Draw the margins of this batch."""
        return DrawnCosFace(scale_of(self), _drawn(self.margin, self.std, self.seed, batch))


@dataclass(frozen=True, eq=False)
class DrawnArcFace:
    """ArcFace with a margin [B] for each sample."""

    scale: float
    margins_B: Tensor

    def target(self, cos_B: Tensor, norms_B: Tensor, labels_B: Tensor) -> TargetLogits:
        del norms_B, labels_B
        value_B, by_cos_B, _ = turned(cos_B, self.margins_B.to(cos_B.dtype))
        return TargetLogits(self.scale * value_B, self.scale * by_cos_B)


@dataclass(frozen=True, eq=False)
class DrawnCosFace:
    """CosFace with a margin [B] for each sample."""

    scale: float
    margins_B: Tensor

    def target(self, cos_B: Tensor, norms_B: Tensor, labels_B: Tensor) -> TargetLogits:
        del norms_B, labels_B
        return TargetLogits(self.scale * (cos_B - self.margins_B.to(cos_B.dtype)), torch.full_like(cos_B, self.scale))


def _drawn(mean: float, std: float, seed: int, batch: MarginBatch) -> Tensor:
    """Return normal numbers [B], float64: Box and Muller's transform of Philox's words. Outside training the mean."""
    labels_B = batch.labels_B
    if not batch.training:
        return torch.full_like(batch.norms_B, mean, dtype=torch.float64)
    places_B = torch.arange(len(labels_B), device=labels_B.device) + batch.first_sample
    steps_B = torch.full_like(labels_B, batch.step & WORD)
    words = philox_words(seed, (places_B & WORD, labels_B & WORD, steps_B, labels_B >> 32 & WORD), _ROUNDS).double()
    radius_B = torch.sqrt(-2.0 * torch.log((words[:, 0] + 1.0) / 2**32))
    return mean + std * radius_B * torch.cos(words[:, 1] * (2.0 * math.pi / 2**32))


def _require_draws(scale: float | None, std: float, seed: int) -> None:
    require_scale(scale)
    require("std", std, lambda v: 0.0 <= v < math.inf, "finite and >= 0")
    integer("seed", seed, 0, 2**64 - 1)
