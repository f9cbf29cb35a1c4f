"""MagFace: a margin that grows with the length of the feature, and trains it (Meng et al., CVPR 2021).

Shapes: B samples.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from geartrain.bridge.head.loss.margins.angular import turned
from geartrain.bridge.head.loss.margins.margin import TargetLogits
from geartrain.bridge.head.loss.margins.scale import require, require_scale, scale_of


@dataclass(frozen=True)
class MagFace:
    """z = scale · ψ(θ + m(a)), and λ · g(a) is added to the loss, with a = |x| kept in [shortest, longest].

    m(a) rises linearly from ``min_margin`` at the shortest length to ``largest_margin`` at the longest, and
    g(a) = 1 / a + a / longest². Meng et al., "MagFace: A Universal Representation for Face Recognition and Quality
    Assessment", CVPR 2021, section 3.2. The gradient flows into the length of the feature: easy samples become longer.
    Where the length is clamped it gets none. For z beyond π see :func:`~.angular.psi`.

    The lengths and λ are those of the paper, for features whose lengths spread over about 10 to 110: a last layer with
    a BatchNorm behind it gives all a length of about √D, and leaves nothing to train.
    """

    scale: float | None = None
    """Multiplies every logit; > 0. None: :func:`~.scale.automatic_scale` of the head's number of classes."""
    min_margin: float = 0.45
    """Margin at the shortest length, radians in [0, π]."""
    largest_margin: float = 0.8
    """Margin at the longest length, radians in [``min_margin``, π]."""
    shortest: float = 10.0
    """Length as which shorter features count; > 0."""
    longest: float = 110.0
    """Length as which longer features count; > ``shortest``."""
    regulariser: float = 35.0
    """Weight λ of the regulariser; at least that of the paper's bound, scale · largest slope of m · longest² ·
    shortest² / (longest² − shortest²), gives each sample one length at which the loss is lowest. >= 0."""

    def __post_init__(self) -> None:
        require_scale(self.scale)
        require("min_margin", self.min_margin, lambda v: 0.0 <= v <= math.pi, "an angle in [0, π] radians")
        largest = self.largest_margin
        require("largest_margin", largest, lambda v: self.min_margin <= v <= math.pi, "in [min_margin, π] radians")
        require("shortest", self.shortest, lambda v: 0.0 < v < math.inf, "finite and > 0")
        require("longest", self.longest, lambda v: self.shortest < v < math.inf, "finite and > shortest")
        require("regulariser", self.regulariser, lambda v: 0.0 <= v < math.inf, "finite and >= 0")

    def target(self, cos_B: Tensor, norms_B: Tensor, labels_B: Tensor) -> TargetLogits:
        """Return the target logits [B], their derivatives by ``cos_B`` and by ``norms_B``, and λ · g of each length."""
        del labels_B
        scale = scale_of(self)
        length_B = norms_B.clamp(self.shortest, self.longest)
        inside_B = (length_B == norms_B).to(cos_B.dtype)
        rise = (self.largest_margin - self.min_margin) / (self.longest - self.shortest)
        value_B, by_cos_B, by_angle_B = turned(cos_B, self.min_margin + rise * (length_B - self.shortest))
        return TargetLogits(
            scale * value_B,
            scale * by_cos_B,
            scale * rise * by_angle_B * inside_B,
            self.regulariser * (1.0 / length_B + length_B / self.longest**2),
            self.regulariser * (1.0 / self.longest**2 - length_B.square().reciprocal()) * inside_B,
        )
