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

from collections.abc import Sequence

import torch
from torch import Tensor

from geartrain.ams.programs.class_head import LOG2_E, NO_LOGIT
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.collectives.cross_entropy import joint_sums
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
    """Several partial sums, so that chunks can be worked on side by side; added up in a fixed order.

    Over ranks that hold the rows, ``link``, the batch is of all of them, ``sizes`` samples of each. Collectives then:
    those of :func:`~geartrain.bridge.collectives.cross_entropy.joint_sums`, of 2·B numbers (3·B with smoothed labels)
    and of B where exponents are shifted, and the reduce-scatter of B·D for the feature gradients.
    """

    def __init__(
        self,
        batch: Batch,
        num_parts: int,
        *,
        want_gradient: bool,
        link: Communicator | None = None,
        sizes: Sequence[int] = (),
    ) -> None:
        self._batch = batch
        self._link, self._sizes = link, sizes
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
        """Losses of the rank's own samples [S], each one's gradient by its features [S, D]; fill in the batch."""
        losses_S, part_BD = self.finish_part()
        if part_BD is None or self._link is None:
            return losses_S, None if part_BD is None else own_gradient(self._batch, part_BD, self._own)
        return losses_S, own_gradient(self._batch, self._link.sum_to_owners(part_BD, self._sizes), self._own)

    def finish_part(self) -> tuple[Tensor, Tensor | None]:
        """:meth:`finish` before the reduce-scatter: what this rank's rows add to every sample's gradient [B, D].

        The sum over the ranks is what :func:`own_gradient` takes.
        """
        batch, own = self._batch, self._own
        shift_B, sum_B, weighted_BD = self._joint()
        cos_B = (batch.features_BD * self.target_rows_BD).sum(1)
        mean_row_D = self._mean_row()  # this rank's part of it
        means = [] if mean_row_D is None else [batch.features_BD @ mean_row_D * batch.scale]
        highest_B = None if self.highest_PB is None else self.highest_PB.amax(0)
        joint_B, (sum_B, joint_cos_B, *means), highest_B = joint_sums(
            self._link, shift_B, sum_B, [cos_B, *means], exp=torch.exp2, shifted=batch.shifted, highest_B=highest_B
        )
        cos_B, means = joint_cos_B.to(cos_B.dtype), [mean.to(cos_B.dtype) for mean in means]
        if highest_B is None and batch.shift_is_highest:
            highest_B = joint_B
        batch.target_B, batch.highest_B = cos_B[own], None if highest_B is None else highest_B[own] / batch.logit_factor
        shift_B, joint_B = shift_beside_target(shift_B, sum_B), shift_beside_target(joint_B, sum_B)
        target = batch.target_logits(cos_B)
        target2_B = target.logits_B * LOG2_E
        top_B = torch.maximum(joint_B, target2_B)
        total_B = sum_B * torch.exp2(joint_B - top_B) + torch.exp2(target2_B - top_B)
        batch.lse2_B = (top_B + torch.log2(total_B)).to(cos_B.dtype)
        losses_B = batch.take_target_weights(target, (batch.lse2_B - target2_B) / LOG2_E, *means)
        if weighted_BD is None:
            return losses_B[own], None
        gradient_BD = weighted_BD.mul_(torch.exp2(shift_B - batch.lse2_B).unsqueeze(1))
        gradient_BD.addcmul_(self.target_rows_BD, batch.target_weight_B.unsqueeze(1))
        if mean_row_D is not None:
            gradient_BD.sub_(mean_row_D * batch.smoothing)
        return losses_B[own], gradient_BD

    @property
    def _own(self) -> slice:
        if self._link is None:
            return slice(None)
        first = sum(self._sizes[: self._link.rank])
        return slice(first, first + self._sizes[self._link.rank])

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


def own_gradient(batch: Batch, summed_SD: Tensor, own: slice) -> Tensor:
    """The gradients of losses by this rank's features at ``own`` in the batch, from the sum over ranks; in place.

    From that with respect to x̂ and that of the batch with respect to |x|.
    """
    summed_SD.mul_(batch.scale)
    if batch.inverse_lengths_B is None:
        return summed_SD
    x_SD = batch.features_BD[own]
    summed_SD.sub_(x_SD * (summed_SD * x_SD).sum(1, keepdim=True))
    summed_SD.mul_(batch.inverse_lengths_B[own].unsqueeze(1))
    if batch.norm_weight_B is not None:
        summed_SD.addcmul_(x_SD, batch.norm_weight_B[own].unsqueeze(1))
    return summed_SD
