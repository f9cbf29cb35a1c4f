"""Batch of a head's passes over the rows, and the compute types.

Legend: B samples, D width, N rows of one chunk.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import cast

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.programs.class_head import LOG2_E, UNSHIFTED_LIMIT
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.specs import Ids
from geartrain.bridge.head.loss.margins.margin import (
    NORM_FLOOR,
    Margin,
    NegativesMargin,
    TargetLogits,
    changes_negatives,
)
from geartrain.bridge.head.loss.margins.scale import scale_of
from geartrain.bridge.kernels.launch import runs_kernels
from geartrain.bridge.kernels.sample_terms import PreparedLabels, prepare_features
from geartrain.bridge.placements.workspace import Arithmetic
from geartrain.bridge.rows.transfers import upload

_ALL = slice(None)


def inverse_lengths(rows_ND: Tensor) -> Tensor:
    """Return 1 / length of each row, [N]."""
    inverse_N: Tensor = torch.linalg.vector_norm(rows_ND, dim=1).clamp_(min=NORM_FLOOR).reciprocal_()
    return inverse_N


def normalise_(rows_ND: Tensor) -> Tensor:
    """Scale each row to unit length in place; return the inverse lengths [N]."""
    inverse_N = inverse_lengths(rows_ND)
    rows_ND.mul_(inverse_N.unsqueeze(1))
    return inverse_N


class Targets:
    """Lookup of the samples whose target row lies in a chunk."""

    def __init__(self, positions_B: Ids) -> None:
        self._order = np.argsort(positions_B, kind="stable")
        self._sorted = positions_B[self._order]
        self._there: Tensor | None = None

    def within(self, start: int, stop: int) -> tuple[Ids, Ids]:
        """Return (samples, rows counted from ``start``), int64, of targets at positions ``start`` … ``stop`` − 1."""
        low, high = np.searchsorted(self._sorted, (start, stop))
        return self._order[low:high], self._sorted[low:high] - start

    def within_on(self, device: torch.device, start: int, stop: int) -> tuple[Tensor, Tensor] | None:
        """Return :meth:`within` on ``device``, to which the first call copies all targets; None: there are none."""
        low, high = np.searchsorted(self._sorted, (start, stop))
        if low == high:
            return None
        if self._there is None:
            self._there = upload(np.stack([self._order, self._sorted]), device)
        return self._there[0, low:high], self._there[1, low:high] - start


@dataclass(frozen=True, eq=False)
class DeviceTargets:
    """Positions of the target rows, known to the device alone: every chunk compares every sample."""

    positions_B: Tensor
    """int64 [B]; −1: in no chunk."""

    def rows(self, start: int, num_rows: int) -> tuple[Tensor, Tensor]:
        """Return (rows [B] from ``start``, clamped to the chunk; bool [B], whether that is the sample's target)."""
        rows_B = self.positions_B - start
        return rows_B.clamp(0, num_rows - 1), (rows_B >= 0) & (rows_B < num_rows)


@dataclass(kw_only=True)
class Batch:
    """Data of O(B·D) numbers, enough for the gradient of any row once the log-sum-exp is known."""

    arithmetic: Arithmetic
    margin: Margin | None
    targets: Targets | DeviceTargets
    labels_B: Tensor
    """Ids of the classes, int64, on the device."""
    features_BD: Tensor
    """x̂ (x without a margin), compute dtype."""
    inverse_lengths_B: Tensor | None
    """1 / |x|; None without a margin."""
    shifted: bool
    """Whether exponents are shifted by the running maximum; if not, exp(logit) itself stays in range."""
    offsets_A: Tensor | None = None
    """Added to the logits, to base 2, of each active row; [A] in the compute dtype; None: 0."""
    smoothing: float = 0.0
    """Part of each sample's target that is spread over the classes."""
    spread_over: float = 1.0
    """Number of classes over which it is spread: the active ones, or those that they stand for."""
    looks_for_highest: bool = True
    """Whether the largest other logit is computed even where the sums do not need it."""
    shifts_by_highest: bool = True
    """Whether the sums' largest logit is what shifts the exponents."""
    num_active: int = 0
    """Active classes of the step."""
    counts_B: Tensor | None = None
    """Counts of labels on a device, float32: 1 where the sample counts, 0 where it is ignored, NaN where its label is
    of no class; None: all count. Samples that do not count have features of 0, and rows learn nothing from them."""
    num_counted: Tensor | None = None
    """Sum of the counts: NaN if there is a wrong label."""
    own: slice
    """Slice of this rank's samples."""
    late_divisors: tuple[Tensor, Tensor] | None = None
    """Number of counted samples, or 1, and their average by rank, where only the device knows; without bad labels."""
    queries_BD: Tensor | None = None
    """Features times ``logit_factor`` in the type of products, if a kernel has made them."""
    centers: int = 1
    """Centers of each class, K: rows are [N, K · D]."""
    size: int = field(init=False)
    """Number of samples, B."""
    scale: float = field(init=False)
    """Factor between cosines and logits."""
    logit_factor: float = field(init=False)
    """Factor between cosines and logits to base 2: exp2 is twice as fast as exp on a CPU."""
    negatives_margin: NegativesMargin | None
    """Margin, if it changes the logits of other classes."""
    target_B: Tensor = field(init=False)
    """Cosine of each target (its logit without a margin), of this rank's samples."""
    highest_B: Tensor | None = field(default=None, init=False)
    """Largest logit of the other active classes; None where it was not computed."""
    losses_B: Tensor = field(init=False)
    lse2_B: Tensor = field(init=False)
    """Log-sum-exp of the logits, to base 2."""
    target_weight_B: Tensor = field(init=False)
    """dloss_b/dcos of the target, divided by the scale."""
    norm_weight_B: Tensor | None = None
    """dloss_b/d|x|, of a margin that trains the lengths of features; None: 0."""

    def __post_init__(self) -> None:
        self.size = len(self.features_BD)
        self.scale = 1.0 if self.margin is None else scale_of(self.margin)
        self.logit_factor = self.scale * LOG2_E

    @cached_property
    def divisor(self) -> int | Tensor:
        """Divisor of sums over the batch: the samples that count, or 1 where there are none."""
        return max(1, self.size) if self.num_counted is None else self.num_counted.clamp(min=1)

    @staticmethod
    def of(
        features_BD: Tensor,
        targets: Targets | DeviceTargets,
        labels_B: Ids | Tensor,
        margin: Margin | None,
        num_rows: int,
        arithmetic: Arithmetic,
        smoothing: float = 0.0,
        late: PreparedLabels | None = None,
        *,
        num_active: int = 0,
        centers: int = 1,
        looks_for_highest: bool = True,
        own: slice = _ALL,
    ) -> Batch:
        """Prepare a batch with these targets; exponentials of up to ``num_rows`` rows are summed, or of rows that stand
        for that many. ``smoothing`` of each target is spread over them.
        """
        with torch.inference_mode(False), torch.no_grad():
            queries_BD: Tensor | None = None
            counts_B, num_counted = (None, None) if late is None else (late.counts_B, late.num_counted)
            if runs_kernels(arithmetic.device) and arithmetic.compute == torch.float32:
                factor = LOG2_E if margin is None else scale_of(margin) * LOG2_E
                own_BD, inverse_B, queries_BD = prepare_features(
                    features_BD, counts_B, unit=margin is not None, factor=factor, dtype=arithmetic.matmul
                )
            else:
                own_BD = features_BD.detach().to(arithmetic.compute, copy=True).contiguous()
                if counts_B is not None:
                    own_BD = own_BD.where((counts_B == 1).unsqueeze(1), 0.0)
                inverse_B = None if margin is None else normalise_(own_BD)
        negatives_margin = cast(NegativesMargin, margin) if changes_negatives(margin) else None
        if (
            negatives_margin is not None and arithmetic.matmul == torch.float16
        ):  # a dtype that does not hold exponentials times a derivative
            arithmetic = replace(arithmetic, matmul=arithmetic.compute)
        fits = (
            margin is not None and negatives_margin is None and scale_of(margin) + math.log(num_rows) < UNSHIFTED_LIMIT
        )
        return Batch(
            arithmetic=arithmetic,
            margin=margin,
            negatives_margin=negatives_margin,
            targets=targets,
            labels_B=upload(labels_B, arithmetic.device),
            features_BD=own_BD,
            inverse_lengths_B=inverse_B,
            shifted=not fits or arithmetic.matmul == torch.float16,
            smoothing=smoothing,
            spread_over=num_rows,
            counts_B=counts_B,
            num_counted=num_counted,
            late_divisors=None if late is None else (late.divisor, late.rank_divisor),
            queries_BD=queries_BD,
            num_active=num_active,
            centers=centers,
            looks_for_highest=looks_for_highest,
            own=own,
        )

    def target_logits(self, cos_B: Tensor) -> TargetLogits:
        """Return the margin's result for the targets' cosines (without a margin their logits, unchanged).

        Raises InvalidArgument for a margin that returns anything else than vectors [B].
        """
        if self.margin is None or self.inverse_lengths_B is None:
            return TargetLogits(cos_B, torch.ones_like(cos_B))
        made = TargetLogits(*self.margin.target(cos_B, self.inverse_lengths_B.reciprocal(), self.labels_B))
        for name, value_B in zip(made._fields, made, strict=True):
            if value_B is not None and (value_B.shape != cos_B.shape or value_B.dtype != cos_B.dtype):
                raise InvalidArgument(
                    f"{name} of {self.margin!r} are {value_B.dtype} {list(value_B.shape)}; they must be like the "
                    f"cosines, {cos_B.dtype} {list(cos_B.shape)}"
                )
        return made

    def record_target_weights(
        self, target: TargetLogits, losses_B: Tensor, mean_logits_B: Tensor | None = None
    ) -> Tensor:
        """Record the derivatives of each sample's loss by its target's cosine and its feature's length.

        ``losses_B``, float64, are −log of the targets' probabilities; returned in the compute dtype with the margin's
        penalties, and smoothed if ``mean_logits_B`` over all classes are given: log-sum-exp − (1 − ε) · target logit
        − ε · mean logit.
        """
        by_logit_B = torch.expm1(-losses_B).to(self.arithmetic.compute)
        losses_B = losses_B.to(self.arithmetic.compute)
        if mean_logits_B is not None:
            by_logit_B += self.smoothing
            losses_B = losses_B + self.smoothing * (target.logits_B - mean_logits_B)
        self.target_weight_B = by_logit_B * target.by_cos_B / self.scale
        if target.by_norm_B is not None:
            self.norm_weight_B = by_logit_B * target.by_norm_B
        if target.penalty_by_norm_B is not None:
            of_penalty_B = target.penalty_by_norm_B
            self.norm_weight_B = of_penalty_B if self.norm_weight_B is None else self.norm_weight_B + of_penalty_B
        return losses_B if target.penalty_B is None else losses_B + target.penalty_B

    @property
    def notes_highest(self) -> bool:
        """Whether the passes compute the largest other logit apart from the shift, which may be of changed logits."""
        return self.looks_for_highest and not self.shift_is_highest

    @property
    def shift_is_highest(self) -> bool:
        """Whether exponents are shifted by the largest logit of the other classes itself."""
        plain = self.offsets_A is None and self.negatives_margin is None
        return self.shifted and self.shifts_by_highest and plain

    def row_factors(self, upstream: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the factors of the row gradients, divided by the scale: a number (0-dim) and, where samples count
        differently, a weight for each [B] of at most 1, of any sign; None: 1.

        ``upstream`` is the derivative of the whole by the mean loss (0-dim), or by each sample's [B]. Weights are
        divided by the largest: they may be loss scales, by which no feature could be multiplied in float16.
        """
        compute = self.arithmetic.compute
        if upstream.ndim == 0:
            return (upstream * (self.scale / self.divisor)).to(compute), None
        if self.size == 0:
            return torch.zeros((), dtype=compute, device=self.arithmetic.device), None
        upstream_B = upstream.to(compute)
        largest = torch.linalg.vector_norm(upstream_B, torch.inf)
        return largest * self.scale, upstream_B / largest.clamp(min=torch.finfo(compute).tiny)

    @property
    def class_smoothing(self) -> float:
        """Smoothed part of each class: the derivative of a smoothed loss by every logit is smaller by this."""
        return self.smoothing / max(1.0, self.spread_over)

    def common_gradient(self, weights_B: Tensor | None) -> Tensor | None:
        """Return smoothing's term of the gradient of every unit row [D], divided by the factor of :meth:`row_factors`.

        A row's term is this times 2^offset, the number of classes it stands for. None without smoothing.
        """
        if self.smoothing == 0:
            return None
        sum_D = self.features_BD.sum(0) if weights_B is None else weights_B @ self.features_BD
        return sum_D.mul_(-self.class_smoothing)

    def offsets(self, start: int, num_rows: int) -> Tensor | None:
        """Return the offsets of ``num_rows`` rows from position ``start`` on."""
        return None if self.offsets_A is None else self.offsets_A[start : start + num_rows]


def chunk_rows_for(batch: int, dim: int, device: torch.device) -> int:
    """Return rows of a chunk whose logits and rows fit in a core's cache (1 MiB each), or fill a GPU (64 MiB)."""
    budget_bytes = (1 if device.type == "cpu" else 64) << 20
    return max(256, min(1 << 20, budget_bytes // (4 * max(batch, dim, 1))))


def with_ones(features_BD: Tensor) -> Tensor:
    """Return [B, D + 1]: the features, each followed by a one, the factor of the class's bias in its row's last column.

    So the bias is stored, trained, sampled and saved with the row, wherever rows are.
    """
    return torch.cat([features_BD, features_BD.new_ones(len(features_BD), 1)], dim=1)


def with_zeros(rows_ND: Tensor, width: int) -> Tensor:
    """Return [N, ``width``]: the rows themselves, or with a column of zero biases where ``width`` has one more."""
    return rows_ND if rows_ND.shape[1] == width else torch.cat([rows_ND, rows_ND.new_zeros(len(rows_ND), 1)], dim=1)
