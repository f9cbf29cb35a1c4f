"""AdaFace: a margin by the length of the feature, a measure of the image's quality (Kim et al., CVPR 2022).

Shapes: B samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from geartrain.bridge.head.loss.margins.angular import COS_LIMIT, turned
from geartrain.bridge.head.loss.margins.margin import MarginBatch, TargetLogits
from geartrain.bridge.head.loss.margins.scale import require, require_scale, scale_of

_MIN_STD = 1e-3
"""Added to the standard deviation, which is 0 where all features are equally long."""


@dataclass(frozen=True)
class AdaFace:
    """z = scale · (cos(θ − margin · q) − margin · (1 + q)) with the quality q = clip(h · (|x| − μ) / σ, −1, 1).

    Kim, Jain and Liu, "AdaFace: Quality Adaptive Margin for Face Recognition", CVPR 2022, section 4.2. A long feature
    (q = 1) has a margin that stresses hard samples, a short one (q = −1) that of ArcFace, which spares them. The angle
    stays in [0, π]. μ and σ are moving means of the mean and standard deviation of |x| over joint batches of training:
    they are learned (in ``state_dict``), begin with the first batch's, and take up a batch before it is used; a batch
    of one sample leaves σ as it is. Lengths count as constants: q sends no gradient into them.
    """

    scale: float | None = None
    """Multiplies every logit; > 0. None: :func:`~.scale.automatic_scale` of the head's number of classes."""
    margin: float = 0.4
    """Margin, in [0, π / 2]."""
    h: float = 0.333
    """Share of a standard deviation that is mapped to 1; > 0."""
    momentum: float = 0.99
    """Momentum of the moving means, in [0, 1)."""

    def __post_init__(self) -> None:
        require_scale(self.scale)
        require("margin", self.margin, lambda v: 0.0 <= v <= math.pi / 2, "in [0, π / 2]")
        require("h", self.h, lambda v: 0.0 < v < math.inf, "finite and > 0")
        require("momentum", self.momentum, lambda v: 0.0 <= v < 1.0, "in [0, 1)")

    def for_batch(self, batch: MarginBatch) -> QualityMargin:
        """Return the margin for the lengths of this batch. With ranks and rows in a cluster one all-reduce of 16
        bytes."""
        mean, std, batches = (batch.recall(name) for name in ("norm_mean", "norm_std", "norm_batches"))
        if batch.training:
            norms_B, size = batch.norms_B.double(), batch.num_counted
            of_batch, square = batch.joint_mean(torch.stack([norms_B, norms_B.square()]))
            share = (1.0 / (batches + 1.0)).clamp(min=1.0 - self.momentum)
            if isinstance(size, Tensor):
                size = size.clamp(min=2)
            if isinstance(size, Tensor) or size > 1:
                variance = (square - of_batch.square()).clamp(min=0.0) * (size / (size - 1))
                std = std + share * (variance.sqrt() - std)
            mean = mean + share * (of_batch - mean)
            batch.learn(norm_mean=mean, norm_std=std, norm_batches=batches + 1.0)
        quality_B = ((batch.norms_B - mean) * (self.h / (std + _MIN_STD))).clamp(-1.0, 1.0)
        return QualityMargin(scale_of(self), self.margin, torch.where(batches + batch.training > 0, quality_B, 0.0))


@dataclass(frozen=True, eq=False)
class QualityMargin:
    """Margin of :class:`AdaFace` for a batch whose qualities [B] are known."""

    scale: float
    margin: float
    quality_B: Tensor

    def target(self, cos_B: Tensor, norms_B: Tensor, labels_B: Tensor) -> TargetLogits:
        del norms_B, labels_B
        angle_B = self.margin * self.quality_B.to(cos_B.dtype)
        theta_B = torch.acos(cos_B.clamp(-COS_LIMIT, COS_LIMIT)) - angle_B
        inside_B = ((theta_B >= 0) & (theta_B <= math.pi)).to(cos_B.dtype)
        _, by_cos_B, _ = turned(cos_B, -angle_B)
        value_B = torch.cos(theta_B.clamp(0.0, math.pi)) - self.margin * self.quality_B.to(cos_B.dtype) - self.margin
        return TargetLogits(self.scale * value_B, self.scale * by_cos_B * inside_B)
