"""The loss of a class head and its feature gradient, from sums over the rows that are made chunk by chunk.

No logits matrix exists. Per sample there is a sum of exp(logit − shift) and the same sum weighted by the rows (an
online log-sum-exp; Milakov and Gimelshein 2018, as in FlashAttention). The target column is left out of both and added
at the end with the derivative of its margin. Smoothed labels need the sum of all rows besides: the
mean logit is the logit of their mean, and what it adds to a gradient is the same for all samples, or rows. With x̂, ŵ of
unit length, cos_bj = x̂_b·ŵ_j and g_bj = dloss/dcos_bj:
    dloss/dx̂_b = Σ_j g_bj ŵ_j,   dloss/dx = (dx̂ − (dx̂·x̂) x̂) / |x| + dloss/d|x| · x̂
where the last term is that of a margin which uses |x|.
Legend: B samples, D width, P parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from geartrain.ams.programs.class_head import LOG2_E, NO_LOGIT
from geartrain.bridge.head.batch import Batch


class PartialSums:
    """Running sums over some chunks, which a :class:`~.chunk_pass.ChunkPass` adds one after the other."""

    def __init__(
        self,
        target_rows_BD: Tensor,
        shift_B: Tensor | None,
        sum_B: Tensor,
        weighted_BD: Tensor | None,
        row_sum_D: Tensor | None = None,
        highest_B: Tensor | None = None,
    ) -> None:
        self.target_rows_BD = target_rows_BD
        """The (unit) rows of the targets met so far."""
        self.shift_B = shift_B
        """Largest logit to base 2 met so far, targets left out; None: exponentials need no shift."""
        self.sum_B = sum_B
        """Sum of exp2(logit − shift)."""
        self.weighted_BD = weighted_BD
        """The same sum weighted by the (unit) rows."""
        self.row_sum_D = row_sum_D
        """Sum of the (unit) rows, each as often as classes that it stands for, float64; None: not wanted."""
        self.highest_B = highest_B
        """Largest logit to base 2 without offsets, targets left out; None: it is the shift, or not looked for."""

    def lift(self, shift_B: Tensor) -> None:
        """Express the sums with a shift that is nowhere below the present one."""
        if self.shift_B is None:
            return
        shrink_B = torch.exp2(self.shift_B - shift_B)
        self.sum_B *= shrink_B
        if self.weighted_BD is not None:
            self.weighted_BD *= shrink_B.unsqueeze(1)
        self.shift_B = shift_B


class OnlineSoftmax:
    """Several partial sums, so that chunks can be worked on side by side; added up in a fixed order."""

    def __init__(self, batch: Batch, num_parts: int, *, want_gradient: bool) -> None:
        self._batch = batch
        rows, width = batch.features_BD.shape
        compute, device = batch.arithmetic.compute, batch.arithmetic.device
        self.target_rows_BD = torch.zeros_like(batch.features_BD)
        self.shift_PB = torch.full((num_parts, rows), NO_LOGIT, dtype=compute, device=device) if batch.shifted else None
        self.sum_PB = torch.zeros(num_parts, rows, dtype=torch.float64, device=device)
        self.weighted_PBD = _zeros(num_parts, rows, width, compute, device) if want_gradient else None
        self.row_sum_PD = torch.zeros(num_parts, width, dtype=torch.float64, device=device) if batch.smoothing else None
        self.highest_PB = (
            torch.full((num_parts, rows), NO_LOGIT, dtype=compute, device=device) if batch.notes_highest else None
        )
        self.parts = [self._part(number) for number in range(num_parts)]
        """The same memory, part by part."""

    def _part(self, number: int) -> PartialSums:
        shift_PB, weighted_PBD, row_sum_PD = self.shift_PB, self.weighted_PBD, self.row_sum_PD
        return PartialSums(
            self.target_rows_BD,
            None if shift_PB is None else shift_PB[number],
            self.sum_PB[number],
            None if weighted_PBD is None else weighted_PBD[number],
            None if row_sum_PD is None else row_sum_PD[number],
            None if self.highest_PB is None else self.highest_PB[number],
        )

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """Return the losses [B] and the gradient of each by its features [B, D]; fill in the batch."""
        batch, target_rows_BD = self._batch, self.target_rows_BD
        cos_B = (batch.features_BD * target_rows_BD).sum(1)
        target = batch.target_logits(cos_B)
        shift_B, sum_B, weighted_BD = self._joint()
        batch.target_B, batch.highest_B = cos_B, self._highest(shift_B)
        target2_B = target.logits_B * LOG2_E
        shift_B = shift_beside_target(shift_B, sum_B)
        highest_B = torch.maximum(shift_B, target2_B)
        total_B = sum_B * torch.exp2(shift_B - highest_B) + torch.exp2(target2_B - highest_B)
        batch.lse2_B = (highest_B + torch.log2(total_B)).to(cos_B.dtype)
        mean_row_D = self._mean_row()
        mean_logits_B = None if mean_row_D is None else batch.features_BD @ mean_row_D * batch.scale
        losses_B = batch.take_target_weights(target, (batch.lse2_B - target2_B) / LOG2_E, mean_logits_B)
        if weighted_BD is None:
            return losses_B, None
        gradient_BD = weighted_BD.mul_(torch.exp2(shift_B - batch.lse2_B).unsqueeze(1))
        gradient_BD.addcmul_(target_rows_BD, batch.target_weight_B.unsqueeze(1))
        if mean_row_D is not None:
            gradient_BD.sub_(mean_row_D * batch.smoothing)
        return losses_B, through_normalisation(gradient_BD.mul_(batch.scale), batch)

    def _highest(self, shift_B: Tensor) -> Tensor | None:
        """Largest cosine (logit without a margin) [B] of the others, where it is known."""
        if self.highest_PB is not None:
            return self.highest_PB.amax(0) / self._batch.logit_factor
        return shift_B / self._batch.logit_factor if self._batch.shift_is_highest else None

    def _mean_row(self) -> Tensor | None:
        """Mean [D] of the (unit) rows of all classes, compute dtype; None without smoothing."""
        if self.row_sum_PD is None:
            return None
        return (self.row_sum_PD.sum(0) / max(1.0, self._batch.spread_over)).to(self.target_rows_BD.dtype)

    def _joint(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """(shift [B], sum [B], weighted sum [B, D]) over all parts."""
        first = self.parts[0]
        shifts = [part.shift_B for part in self.parts if part.shift_B is not None]
        shift_B = torch.stack(shifts).amax(0) if shifts else torch.zeros_like(self._batch.features_BD[:, 0])
        for part in self.parts:
            part.lift(shift_B)
        for part in self.parts[1:]:
            first.sum_B += part.sum_B
            if first.weighted_BD is not None and part.weighted_BD is not None:
                first.weighted_BD += part.weighted_BD
        return shift_B, first.sum_B, first.weighted_BD


def _zeros(parts: int, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[P, B, D]. On a CPU PyTorch would wake all its threads, which then spin on the cores that the passes need."""
    values_PBD = torch.empty(parts, rows, width, dtype=dtype, device=device)
    if device.type != "cpu":
        return values_PBD.zero_()
    values_PBD.numpy().fill(0)
    return values_PBD


def shift_beside_target(shift_B: Tensor, sum_B: Tensor) -> Tensor:
    """The shift [B] that sums have; below every logit where only the target is active, which may itself lie far below.

    Where exponents are not shifted, 0 would be above such a target, whose exponential might then vanish beside it.
    """
    return torch.where(sum_B == 0, NO_LOGIT, shift_B)


def through_normalisation(gradient_BD: Tensor, batch: Batch) -> Tensor:
    """Gradient with respect to x from that with respect to x̂ and that of the batch with respect to |x|; in place."""
    if batch.inverse_lengths_B is None:
        return gradient_BD
    x_BD = batch.features_BD
    gradient_BD.sub_(x_BD * (gradient_BD * x_BD).sum(1, keepdim=True))
    gradient_BD.mul_(batch.inverse_lengths_B.unsqueeze(1))
    if batch.norm_weight_B is not None:
        gradient_BD.addcmul_(x_BD, batch.norm_weight_B.unsqueeze(1))
    return gradient_BD
