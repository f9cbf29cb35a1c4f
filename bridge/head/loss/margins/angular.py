"""Angular margins on the target logit.

All of them are one formula (PLSC, section 2.1; ArcFace, CosFace, SphereFace): the target's cos θ becomes
ψ(m1·θ + m2) − m3, then every logit is multiplied by ``scale``. Beyond π the cosine is continued by
ψ(x) = (−1)^k cos x − 2k on [kπ, (k+1)π], which is smooth and strictly falling, so that a larger angle never scores
better.

Shapes: B samples.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from geartrain.bridge.head.loss.margins.margin import TargetLogits
from geartrain.bridge.head.loss.margins.scale import require, require_scale, scale_of

COS_LIMIT = 1.0 - 1e-6
"""cos θ is clamped to ± this before acos, whose slope is infinite at ±1."""


def psi(angle: Tensor) -> tuple[Tensor, Tensor]:
    """Return ψ(angle) and dψ/d(angle); angles in radians, any shape, >= −π.

    ψ(x) = (−1)^k cos x − 2k and ψ'(x) = −|sin x| with k = ⌊x/π⌋; below 0 the formula continues with negative k.
    """
    k = torch.floor(angle / math.pi)
    sign = 1.0 - 2.0 * torch.remainder(k, 2.0)
    return sign * torch.cos(angle) - 2.0 * k, -torch.abs(torch.sin(angle))


def turned(cos_B: Tensor, angle_B: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    """Return ψ(θ + angle) and its derivatives by cos θ and by the angle, [B] each.

    The derivative by cos θ is 0 where θ is clamped; the angle is at least −π.
    """
    clamped_B = cos_B.clamp(-COS_LIMIT, COS_LIMIT)
    value_B, slope_B = psi(torch.acos(clamped_B) + angle_B)
    inside_B = (cos_B == clamped_B).to(cos_B.dtype)
    return value_B, -slope_B * torch.rsqrt(1.0 - clamped_B * clamped_B) * inside_B, slope_B


@dataclass(frozen=True)
class CombinedMargin:
    """Target logit = scale · (ψ(m1·θ + m2) − m3); other logits = scale · cos θ."""

    scale: float | None = None
    """Multiplies every logit; > 0. None: :func:`~.scale.automatic_scale` of the head's number of classes."""
    m1: float = 1.0
    """Multiplies the angle (SphereFace); >= 1."""
    m2: float = 0.0
    """Added to the angle, radians (ArcFace); in [0, π]."""
    m3: float = 0.0
    """Subtracted from the cosine (CosFace); >= 0."""

    def __post_init__(self) -> None:
        require_scale(self.scale)
        require("m1", self.m1, lambda v: 1.0 <= v < math.inf, "finite and >= 1")
        require("m2", self.m2, lambda v: 0.0 <= v <= math.pi, "an angle in [0, π] radians")
        require("m3", self.m3, lambda v: 0.0 <= v < math.inf, "finite and >= 0")

    @property
    def combined(self) -> CombinedMargin:
        """This margin, which has the general form already."""
        return self

    def target(self, cos_B: Tensor, norms_B: Tensor | None = None, labels_B: Tensor | None = None) -> TargetLogits:
        """Return target logits as :class:`~.margin.Margin`; norms and labels are not used.

        Where the clamp to ± (1 − 1e-6) acts the derivative is 0, like that of ``torch.clamp``.
        """
        del norms_B, labels_B
        scale = scale_of(self)
        if self.m1 == 1.0 and self.m2 == 0.0:
            return TargetLogits(scale * (cos_B - self.m3), torch.full_like(cos_B, scale))
        clamped_B = cos_B.clamp(-COS_LIMIT, COS_LIMIT)
        theta_B = torch.acos(clamped_B)
        value_B, slope_B = psi(self.m1 * theta_B + self.m2)
        dtheta_B = -torch.rsqrt(1.0 - clamped_B * clamped_B)
        inside_B = (cos_B == clamped_B).to(cos_B.dtype)
        by_cos_B = scale * self.m1 * slope_B * dtheta_B * inside_B
        return TargetLogits(scale * (value_B - self.m3), by_cos_B)


class _Special(ABC):
    """A margin that is a special case of the general form."""

    @property
    @abstractmethod
    def combined(self) -> CombinedMargin:
        """This margin in the general form."""

    def target(self, cos_B: Tensor, norms_B: Tensor | None = None, labels_B: Tensor | None = None) -> TargetLogits:
        return self.combined.target(cos_B, norms_B, labels_B)


@dataclass(frozen=True)
class ArcFace(_Special):
    """Additive angular margin: target logit = scale · ψ(θ + margin)."""

    scale: float | None = None
    """Multiplies every logit; > 0. None: :func:`~.scale.automatic_scale` of the head's number of classes."""
    margin: float = 0.5
    """Added to the angle, radians in [0, π]."""

    def __post_init__(self) -> None:
        require("margin", self.margin, lambda v: 0.0 <= v <= math.pi, "an angle in [0, π] radians")
        _ = self.combined

    @property
    def combined(self) -> CombinedMargin:
        """This margin in the general form."""
        return CombinedMargin(scale=self.scale, m2=self.margin)


@dataclass(frozen=True)
class CosFace(_Special):
    """Additive cosine margin: target logit = scale · (cos θ − margin)."""

    scale: float | None = None
    """Multiplies every logit; > 0. None: :func:`~.scale.automatic_scale` of the head's number of classes."""
    margin: float = 0.35
    """Subtracted from the cosine; >= 0."""

    def __post_init__(self) -> None:
        require("margin", self.margin, lambda v: 0.0 <= v < math.inf, "finite and >= 0")
        _ = self.combined

    @property
    def combined(self) -> CombinedMargin:
        """This margin in the general form."""
        return CombinedMargin(scale=self.scale, m3=self.margin)


@dataclass(frozen=True)
class SphereFace(_Special):
    """Multiplicative angular margin: target logit = scale · ψ(margin · θ)."""

    scale: float | None = None
    """Multiplies every logit; > 0. None: :func:`~.scale.automatic_scale` of the head's number of classes."""
    margin: float = 1.35
    """Factor of the angle; >= 1."""

    def __post_init__(self) -> None:
        require("margin", self.margin, lambda v: 1.0 <= v < math.inf, "finite and >= 1")
        _ = self.combined

    @property
    def combined(self) -> CombinedMargin:
        """This margin in the general form."""
        return CombinedMargin(scale=self.scale, m1=self.margin)


def added_angles(margin: object) -> tuple[float, float] | None:
    """Return (m2, m3) of a margin that is scale · (ψ(θ + m2) − m3), which kernels compute; None: for any other.

    A subclass of one of these may have another formula.
    """
    combined = getattr(margin, "combined", None)
    formulas = (CombinedMargin.target, _Special.target)
    if getattr(type(margin), "target", None) not in formulas or combined is None or combined.m1 != 1.0:
        return None
    return combined.m2, combined.m3
