"""Inter-class filtering: classes that may be the same person under another label do not push a sample away.

Shapes: B samples, N rows of a chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.head.loss.margins.margin import (
    AnyMargin,
    MarginBatch,
    NegativesMargin,
    TargetLogits,
    changes_negatives,
)
from geartrain.bridge.head.loss.margins.scale import require, scale_of, with_scale


@dataclass(frozen=True)
class FilteredMargin:
    """A margin that ignores other classes whose cos θ_j with the sample is above a threshold.

        gt.FilteredMargin(gt.ArcFace(), above=0.4)

    In data collected from the web one person may have two labels. For such a sample the other label's class is
    filtered: its logit is −∞, so it is in no sum, and sample and class do not push each other away. If all its other
    classes are filtered, the sample's loss is 0 plus the margin's penalty (label smoothing still covers all classes).
    InsightFace (``interclass_filtering_threshold``) gives filtered classes the logit 0 instead. The comparison has no
    gradient; accuracy and cosines in ``head.stats`` are over all active classes.

    Not with ``rows="hosted"``. Its products are tensor operations, as those of :class:`~.margin.NegativesMargin`.
    """

    changes_negatives: ClassVar[bool] = True

    margin: AnyMargin
    """Any margin: built in, or of your own."""
    above: float = 0.4
    """Threshold in [−1, 1]. If too low, it also filters hard classes, from which there is most to learn."""

    def __post_init__(self) -> None:
        works = hasattr(self.margin, "target") or hasattr(self.margin, "for_batch")
        if isinstance(self.margin, type) or not works or not hasattr(self.margin, "scale"):
            raise InvalidArgument(
                f"margin is {self.margin!r}; it must be a margin, such as ArcFace(); CosFace(margin=0.0) takes the "
                "place of None"
            )
        require("above", self.above, lambda v: -1.0 <= v <= 1.0, "a cosine, in [−1, 1]")

    @property
    def scale(self) -> float | None:
        """Scale of the inner margin."""
        return self.margin.scale

    def for_classes(self, num_classes: int) -> FilteredMargin:
        """Return this margin with the scale of ``num_classes`` if it is None."""
        return replace(self, margin=with_scale(self.margin, num_classes))

    def for_batch(self, batch: MarginBatch) -> FilteredMargin:
        """Return the filter around the inner margin's ``for_batch``, at the cost of that call."""
        margin: Any = self.margin
        return replace(self, margin=margin.for_batch(batch)) if hasattr(margin, "for_batch") else self

    def target(
        self, cos_B: Tensor, norms_B: Tensor, labels_B: Tensor
    ) -> TargetLogits | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
        """Return the target logits of the inner margin: a sample's own class is never filtered."""
        margin: Any = self.margin
        return margin.target(cos_B, norms_B, labels_B)  # type: ignore[no-any-return]

    def negatives(self, cos_NB: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [N, B] of N classes for B samples, −∞ above the threshold, and their derivatives."""
        margin: NegativesMargin | Any = self.margin
        is_filtered_NB = cos_NB > self.above
        if changes_negatives(margin):
            logits_NB, by_cos_NB = margin.negatives(cos_NB)
        else:
            scale = scale_of(margin)
            logits_NB, by_cos_NB = cos_NB * scale, torch.full_like(cos_NB, scale)
        return logits_NB.masked_fill(is_filtered_NB, -math.inf), by_cos_NB.masked_fill(is_filtered_NB, 0.0)
