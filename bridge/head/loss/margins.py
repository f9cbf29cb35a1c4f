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
from dataclasses import dataclass, is_dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument

COS_LIMIT = 1.0 - 1e-6
"""cos θ is clamped to ± this before acos, whose slope is infinite at ±1."""
SMALLEST_AUTOMATIC_SCALE = 16.0
"""Below it a margin costs accuracy where classes are few (``geartrain bench defaults``)."""


def psi(angle: Tensor) -> tuple[Tensor, Tensor]:
    """Return ψ(angle) and dψ/d(angle); angles in radians, any shape, >= −π.

    ψ(x) = (−1)^k cos x − 2k and ψ'(x) = −|sin x| with k = ⌊x/π⌋; below 0 the formula goes on with negative k.
    """
    k = torch.floor(angle / math.pi)
    sign = 1.0 - 2.0 * torch.remainder(k, 2.0)
    return sign * torch.cos(angle) - 2.0 * k, -torch.abs(torch.sin(angle))


class TargetLogits(NamedTuple):
    """What a margin makes of the targets of B samples: tensors [B] of the dtype of their cosines, on their device."""

    logits_B: Tensor
    """z, that take the place of scale · cos θ."""
    by_cos_B: Tensor
    """∂z/∂cos θ."""
    by_norm_B: Tensor | None = None
    """∂z/∂|x|, for a margin that trains the length of the features; None: 0."""
    penalty_B: Tensor | None = None
    """Added to the loss of each sample; None: nothing."""
    penalty_by_norm_B: Tensor | None = None
    """Its derivative with respect to |x|; None: 0."""


class Margin(Protocol):
    """What a head asks of its margin; ``None`` in its place means a plain linear classifier: logits = x·wᵀ, nothing
    normalised.

    With a margin the logits of a sample x of class y are scale · cos θ_j, but that of its own class, z. The loss is
    −log softmax(z), and its gradient by cos θ_y is (p_y − 1) · ∂z/∂cos θ_y: hence a margin gives z and its derivative.
    One of your own is a frozen dataclass with these two, for instance CosFace with a larger margin for rare classes:

        @dataclass(frozen=True)
        class PerClass:
            margins: tuple[float, ...]
            scale: float = 64.0

            def target(self, cos_B, norms_B, labels_B):
                margin_B = torch.tensor(self.margins, device=cos_B.device, dtype=cos_B.dtype)[labels_B]
                return self.scale * (cos_B - margin_B), torch.full_like(cos_B, self.scale)

    It works wherever the rows are, for it is applied beside the features. Ranks compare margins by their repr, which
    names the settings of a dataclass.
    """

    @property
    def scale(self) -> float | None:
        """Multiplies every logit; finite and > 0. None, of a dataclass: :func:`automatic_scale`, once a head has it."""
        ...

    def target(
        self, cos_B: Tensor, norms_B: Tensor, labels_B: Tensor
    ) -> TargetLogits | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
        """Return the target logits and their derivatives, as :class:`TargetLogits` or the first two or three of its
        fields; all [B], in the dtype of ``cos_B``, on its device.

        Args:
            cos_B: cos θ of each sample and the row of its class; rounding may carry it beyond ± 1.
            norms_B: |x|, the lengths of the features before they are normalised, in the same dtype; at least 1e-12.
            labels_B: int64, ids of the classes.
        """
        ...


def automatic_scale(num_classes: int) -> float:
    """√2 · ln(C − 1), at least 16: what a margin whose ``scale`` is None multiplies the logits of C classes by.

    The fixed scale of AdaCos (Zhang et al., CVPR 2019, section 4.1), which is 0 for two classes.
    """
    return max(SMALLEST_AUTOMATIC_SCALE, math.sqrt(2) * math.log(max(1, num_classes - 1)))


def with_scale(margin: Any, num_classes: int) -> Any:
    """The margin, with the automatic scale of so many classes if it has none."""
    if margin.scale is not None or not is_dataclass(margin):
        return margin
    return replace(margin, scale=automatic_scale(num_classes))  # type: ignore[type-var]


def scale_of(margin: Margin) -> float:
    """Its scale. Raises InvalidArgument if that waits for the number of classes."""
    if margin.scale is None:
        raise InvalidArgument(
            f"scale of {margin!r} is None, which a ClassHead replaces by its number of classes; give a number > 0, "
            "such as 32, where there is no head"
        )
    return margin.scale


@dataclass(frozen=True)
class CombinedMargin:
    """Target logit = scale · (ψ(m1·θ + m2) − m3); other logits = scale · cos θ."""

    scale: float | None = None
    """Multiplies every logit; > 0. None: :func:`automatic_scale` of the head's number of classes."""
    m1: float = 1.0
    """Multiplies the angle (SphereFace); >= 1."""
    m2: float = 0.0
    """Added to the angle, radians (ArcFace); in [0, π]."""
    m3: float = 0.0
    """Subtracted from the cosine (CosFace); >= 0."""

    def __post_init__(self) -> None:
        legal = self.scale is None or 0.0 < self.scale < math.inf
        _require("scale", self.scale, legal, "finite and > 0, or None for that of the number of classes")
        _require("m1", self.m1, 1.0 <= self.m1 < math.inf, "finite and >= 1")
        _require("m2", self.m2, 0.0 <= self.m2 <= math.pi, "an angle in [0, π] radians")
        _require("m3", self.m3, 0.0 <= self.m3 < math.inf, "finite and >= 0")

    @property
    def combined(self) -> CombinedMargin:
        """The same margin in the general form."""
        return self

    def target(self, cos_B: Tensor, norms_B: Tensor | None = None, labels_B: Tensor | None = None) -> TargetLogits:
        """See :meth:`Margin.target`; norms and labels are not looked at.

        Where the clamp to ± (1 − 1e-6) acts the derivative is 0, as that of ``torch.clamp``.
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
        """The same margin in the general form."""

    def target(self, cos_B: Tensor, norms_B: Tensor | None = None, labels_B: Tensor | None = None) -> TargetLogits:
        """See :meth:`CombinedMargin.target`."""
        return self.combined.target(cos_B, norms_B, labels_B)


@dataclass(frozen=True)
class ArcFace(_Special):
    """Additive angular margin: target logit = scale · ψ(θ + margin)."""

    scale: float | None = None
    """Multiplies every logit; > 0. None: :func:`automatic_scale` of the head's number of classes."""
    margin: float = 0.5
    """Radians, in [0, π]."""

    def __post_init__(self) -> None:
        _require("margin", self.margin, 0.0 <= self.margin <= math.pi, "an angle in [0, π] radians")
        _ = self.combined

    @property
    def combined(self) -> CombinedMargin:
        """The same margin in the general form."""
        return CombinedMargin(scale=self.scale, m2=self.margin)


@dataclass(frozen=True)
class CosFace(_Special):
    """Additive cosine margin: target logit = scale · (cos θ − margin)."""

    scale: float | None = None
    """Multiplies every logit; > 0. None: :func:`automatic_scale` of the head's number of classes."""
    margin: float = 0.35
    """Subtracted from the cosine; >= 0."""

    def __post_init__(self) -> None:
        _require("margin", self.margin, 0.0 <= self.margin < math.inf, "finite and >= 0")
        _ = self.combined

    @property
    def combined(self) -> CombinedMargin:
        """The same margin in the general form."""
        return CombinedMargin(scale=self.scale, m3=self.margin)


@dataclass(frozen=True)
class SphereFace(_Special):
    """Multiplicative angular margin: target logit = scale · ψ(margin · θ)."""

    scale: float | None = None
    """Multiplies every logit; > 0. None: :func:`automatic_scale` of the head's number of classes."""
    margin: float = 1.35
    """Multiplies the angle; >= 1."""

    def __post_init__(self) -> None:
        _require("margin", self.margin, 1.0 <= self.margin < math.inf, "finite and >= 1")
        _ = self.combined

    @property
    def combined(self) -> CombinedMargin:
        """The same margin in the general form."""
        return CombinedMargin(scale=self.scale, m1=self.margin)


def _require(name: str, value: float | None, legal: bool, range_text: str) -> None:
    if not legal:
        raise InvalidArgument(f"{name} is {value!r}; it must be {range_text}")
