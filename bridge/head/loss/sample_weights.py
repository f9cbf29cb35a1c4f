"""Samples of a batch that count in the loss, their weights, and the reduction of their losses.

Legend: B samples as given, S of them that count, D width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.specs import Ids
from geartrain.ams.values.text import quoted
from geartrain.bridge.head.loss.checks import check_features, check_label_type, checked_labels
from geartrain.bridge.head.loss.config import HeadConfig, Reduction
from geartrain.bridge.rows.transfers import upload

BAD_WEIGHT = -(2**63)
"""Label that marks a sample on a device whose weight is invalid."""


def checked_weight(weight: Tensor, batch: int) -> Tensor:
    """Return the weights of ``batch`` samples, float64 [B] on the host. Raises InvalidArgument."""
    check_weight_type(weight, batch)
    host_B = weight.detach().cpu().double()
    wrong = torch.nonzero(~((host_B >= 0) & (host_B < math.inf)))
    if len(wrong):
        index = int(wrong[0])
        raise InvalidArgument(f"weight {float(host_B[index])} at index {index} must be finite and >= 0")
    return host_B


def check_weight_type(weight: Tensor, batch: int) -> None:
    """Raise InvalidArgument unless the weight is [B] of numbers without gradient."""
    if not isinstance(weight, Tensor) or weight.shape != (batch,) or weight.is_complex():
        found = f"{weight.dtype} {list(weight.shape)}" if isinstance(weight, Tensor) else quoted(weight)
        raise InvalidArgument(f"weight is {found}; it must be a tensor [{batch}] of numbers, one per sample")
    if weight.requires_grad:
        raise InvalidArgument(
            "weight requires a gradient, and the head gives it none; detach() it, or multiply the losses of a head "
            "with reduction='none' by it"
        )


@dataclass(frozen=True, kw_only=True)
class CountedSamples:
    """Samples of a batch that count: all but the ignored ones."""

    features_SD: Tensor
    """Features [S, D]; [0, D] where they come part by part."""
    labels_S: Any
    """Labels, int64: an array of the host, or a tensor on the features' device where that checks them; ignored ones are
    among those, with weight 0."""
    places: Ids | None
    """Indices [S] of the counted samples among the B; None: all."""
    counted: Tensor | None
    """Indices of the counted samples on the features' device."""
    weight_S: Tensor | None
    """Weights in the dtype of the losses, on the features' device; None: 1. For a mean they are divided by a power of
    two, so that neither they nor their sum leave the range of that dtype."""
    divisor: Any
    """Divisor of a mean: the sum of the weights; for labels on a device a tensor (0-dim, float64)."""
    amount: Any
    """Weight of this rank's loss beside the others': its samples, or their weights; 1 where the loss is no mean.
    For labels on a device possibly a function that makes a tensor [S], whose sum it is."""
    reduces: bool
    """Whether the pass returns the plain mean; else the loss of each sample."""

    @staticmethod
    def of(
        features: Tensor,
        labels: Tensor,
        weight: Tensor | None,
        settings: HeadConfig,
        dim: int,
        live_classes: LiveClasses,
    ) -> CountedSamples:
        """Check a batch. Raises InvalidRows, InvalidIds and InvalidArgument."""
        check_features(features, dim)
        samples = CountedSamples.of_labels(labels, weight, settings, live_classes, num=len(features), like=features)
        kept = samples.counted
        return replace(samples, features_SD=features if kept is None else features.detach()[kept])

    @staticmethod
    def of_labels(
        labels: Tensor,
        weight: Tensor | None,
        settings: HeadConfig,
        live_classes: LiveClasses,
        *,
        num: int,
        like: Tensor,
    ) -> CountedSamples:
        """Check the labels and weights of ``num`` samples, whose features, ``like`` these, come part by part."""
        labels_B = checked_labels(labels, num, live_classes.num_classes, settings.ignore_index)
        weight_B = None if weight is None else checked_weight(weight, num)
        places: Ids | None = None
        if settings.ignore_index is not None and (labels_B == settings.ignore_index).any():
            places = np.flatnonzero(labels_B != settings.ignore_index)
            labels_B = labels_B[places]
            weight_B = None if weight_B is None else weight_B[torch.from_numpy(places)]
        compute = torch.float64 if like.dtype == torch.float64 else torch.float32
        is_mean = settings.reduction == "mean"
        amount = 1.0 if not is_mean else float(len(labels_B) if weight_B is None else weight_B.sum())
        divisor = amount
        if is_mean and weight_B is not None and len(weight_B):
            weight_B = torch.from_numpy(np.ldexp(weight_B.numpy(), -math.frexp(float(weight_B.max()))[1]))
            divisor = float(weight_B.sum())
        return CountedSamples(
            features_SD=like[:0],
            labels_S=live_classes.require(labels_B, "label"),
            places=places,
            counted=None if places is None else upload(places, like.device),
            weight_S=None if weight_B is None else upload(weight_B.to(compute).numpy(), like.device),
            divisor=divisor,
            amount=amount,
            reduces=is_mean and weight is None,
        )

    @staticmethod
    def on_device(
        features: Tensor, labels: Tensor, weight: Tensor | None, settings: HeadConfig, *, num: int
    ) -> CountedSamples:
        """Return ``num`` samples whose labels are on the features' device: the host reads none of their contents.

        Ignored ones stay, with weight 0. The label of a sample whose weight is negative or not finite becomes
        :data:`BAD_WEIGHT`, which no class has. Raises InvalidIds and InvalidArgument for types and shapes.
        """
        check_label_type(labels, num)
        labels_S, is_mean = labels.detach(), settings.reduction == "mean"
        compute = torch.float64 if features.dtype == torch.float64 else torch.float32
        amount: float | Callable[[], Tensor] = 1.0
        if is_mean:
            amount = float(num) if settings.ignore_index is None else partial(labels_S.ne, settings.ignore_index)
        weight_S: Tensor | None = None
        divisor: float | Tensor = 1.0  # of a plain mean the pass knows it
        if weight is not None:
            check_weight_type(weight, num)
            weight_S = upload(weight.detach(), labels.device).double()
            are_good_S = (weight_S >= 0) & (weight_S < math.inf)
            if settings.ignore_index is None:
                labels_S = labels_S.where(are_good_S, BAD_WEIGHT)
            else:
                counts_S = labels_S != settings.ignore_index
                labels_S = labels_S.where(are_good_S | ~counts_S, BAD_WEIGHT)
                are_good_S = are_good_S & counts_S
            weight_S = weight_S.where(are_good_S, 0.0)
            amount = weight_S.clone if is_mean else amount
            if is_mean and num:  # as on the host: divided by a power of two
                weight_S = torch.ldexp(weight_S, -torch.frexp(weight_S.amax()).exponent)
            divisor, weight_S = weight_S.sum(), weight_S.to(compute)
        return CountedSamples(
            features_SD=features.detach(),
            labels_S=labels_S,
            places=None,
            counted=None,
            weight_S=weight_S,
            divisor=divisor,
            amount=amount,
            reduces=is_mean and weight is None,
        )

    def reduced(self, losses: Tensor, batch: int, reduction: Reduction) -> Tensor:
        """Return this rank's loss (0-dim), or the losses [B], from the pass's result: the plain mean, or the losses
        [S].

        Where nothing counts the mean is 0.
        """
        if self.reduces:
            return losses
        if self.weight_S is not None:
            losses = losses * self.weight_S
        if reduction == "none":
            return losses if self.counted is None else losses.new_zeros(batch).index_copy(0, self.counted, losses)
        if reduction == "sum":
            return losses.sum()
        if isinstance(self.divisor, Tensor):
            return losses.sum() / torch.where(self.divisor == 0, 1.0, self.divisor).to(losses)
        return losses.sum() / (self.divisor or 1.0)
