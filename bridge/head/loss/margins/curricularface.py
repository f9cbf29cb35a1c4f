"""CurricularFace: harder classes count more as training proceeds (Huang et al., CVPR 2020).

Shapes: B samples, N rows of a chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from geartrain.bridge.head.loss.margins.angular import turned
from geartrain.bridge.head.loss.margins.margin import MarginBatch, TargetLogits
from geartrain.bridge.head.loss.margins.scale import require, require_scale, scale_of


@dataclass(frozen=True)
class CurricularFace:
    """z = scale · ψ(θ + margin); a class with cos θ_j > ψ(θ + margin) has the logit scale · cos θ_j · (t + cos θ_j).

    Huang et al., "CurricularFace: Adaptive Curriculum Learning Loss for Deep Face Recognition", CVPR 2020, section 3.2.
    t, from 0 on, is the moving mean of the mean target cosine over joint batches of training; it is learned (in
    ``state_dict``) and includes a batch before its use. t and the comparison count as constants for the gradient.

    Not with ``rows="hosted"``. Costs a pull of the labels' rows before the others, or on ranks an all-reduce of 4·B
    bytes, and the products of :class:`~.margin.NegativesMargin`.
    """

    changes_negatives: ClassVar[bool] = True

    scale: float | None = None
    """Multiplies every logit; > 0. None: :func:`~.scale.automatic_scale` of the head's number of classes."""
    margin: float = 0.5
    """Added to the angle, radians in [0, π]."""
    momentum: float = 0.99
    """Momentum of t, in [0, 1)."""

    def __post_init__(self) -> None:
        require_scale(self.scale)
        require("margin", self.margin, lambda v: 0.0 <= v <= math.pi, "an angle in [0, π] radians")
        require("momentum", self.momentum, lambda v: 0.0 <= v < 1.0, "in [0, 1)")

    def for_batch(self, batch: MarginBatch) -> CurriculumMargin:
        """Return the margin at this batch's t. With ranks and rows in a cluster one all-reduce of 8 bytes."""
        cos_B = batch.target_cos()
        t = batch.recall("target_cos_mean")
        if batch.training:
            t = self.momentum * t + (1.0 - self.momentum) * batch.joint_mean(cos_B.unsqueeze(0))[0]
            batch.learn(target_cos_mean=t)
        return CurriculumMargin(scale_of(self), self.margin, t, turned(cos_B, self.margin)[0])


@dataclass(frozen=True, eq=False)
class CurriculumMargin:
    """Margin of :class:`CurricularFace` for a batch whose bounds of hard classes are known."""

    scale: float
    margin: float
    t: Tensor
    bounds_B: Tensor
    """Cosine ψ(θ + margin) above which other classes are hard."""

    def target(self, cos_B: Tensor, norms_B: Tensor, labels_B: Tensor) -> TargetLogits:
        del norms_B, labels_B
        value_B, by_cos_B, _ = turned(cos_B, self.margin)
        return TargetLogits(self.scale * value_B, self.scale * by_cos_B)

    def negatives(self, cos_NB: Tensor) -> tuple[Tensor, Tensor]:
        t = self.t.to(cos_NB.dtype)
        is_hard_NB = cos_NB > self.bounds_B.to(cos_NB.dtype)
        logits_NB = self.scale * cos_NB * torch.where(is_hard_NB, t + cos_NB, 1.0)
        return logits_NB, self.scale * torch.where(is_hard_NB, t + 2.0 * cos_NB, 1.0)
