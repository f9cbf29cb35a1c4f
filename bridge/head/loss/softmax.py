"""Loss of a class head and its feature gradient, from sums over the rows that are made chunk by chunk.

No logits matrix exists. Per sample there is a sum of exp(logit − shift) and the same sum weighted by the rows (an
online log-sum-exp; Milakov and Gimelshein 2018, as in FlashAttention). The target column is left out of both and added
at the end with the derivative of its margin. Smoothed labels also need the sum of all rows: the mean logit is the logit
of their mean, and its part of a gradient is the same for all samples, or rows. With x̂, ŵ of unit length,
cos_bj = x̂_b·ŵ_j and g_bj = dloss/dcos_bj:
    dloss/dx̂_b = Σ_j g_bj ŵ_j,   dloss/dx = (dx̂ − (dx̂·x̂) x̂) / |x| + dloss/d|x| · x̂
where the last term is that of a margin which uses |x|.
Legend: B samples, D width, P parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from geartrain.ams.programs.class_head import LOG2_E, NO_LOGIT
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.collectives.cross_entropy import joint_sums
from geartrain.bridge.head.loss.batch import Batch
from geartrain.bridge.rows.transfers import upload_together


@dataclass(eq=False)
class PartialSums:
    """Running sums over some chunks, P of them side by side, to which a :class:`~.chunk_pass.ChunkPass` adds."""

    target_rows_BD: Tensor
    """Target (unit) rows found so far."""
    shift_PB: Tensor | None
    """Largest logit to base 2 so far, without targets; None: exponentials need no shift."""
    sum_PB: Tensor
    """Sum of exp2(logit − shift), float64."""
    weighted_PBD: Tensor | None
    """The same sum weighted by the (unit) rows."""
    row_sum_PD: Tensor | None
    """Sum of the (unit) rows, each as often as classes that it stands for, float64; None: not needed."""
    highest_PB: Tensor | None
    """Largest logit to base 2 without offsets and targets; None: it is the shift, or not computed."""

    def part(self, number: int) -> PartialSums:
        """Return one part of the sums, in the same memory."""
        parts = (self.shift_PB, self.sum_PB, self.weighted_PBD, self.row_sum_PD, self.highest_PB)
        return PartialSums(self.target_rows_BD, *(None if of is None else of[number : number + 1] for of in parts))  # type: ignore[arg-type]

    def lift(self, shift_B: Tensor) -> None:
        """Express the sums with a shift [B] that is at least the present one everywhere."""
        if self.shift_PB is None:
            return
        shrink_PB = torch.exp2(self.shift_PB - shift_B)
        self.sum_PB.mul_(shrink_PB)
        if self.weighted_PBD is not None:
            self.weighted_PBD.mul_(shrink_PB.unsqueeze(2))
        self.shift_PB.copy_(shift_B.expand_as(self.shift_PB))


class OnlineSoftmax:
    """Several partial sums, so that chunks can be computed in parallel; added up in a fixed order.

    If ranks hold the rows, ``link`` is theirs, and the batch is of all of them, ``sizes`` samples of each. Collectives
    are then those of :func:`~geartrain.bridge.collectives.cross_entropy.joint_sums`, of 2·B numbers (3·B with smoothed
    labels) and of B where exponents are shifted, and the reduce-scatter of B·D for the feature gradients.
    """

    leaves_out = False
    """Whether losses and gradients already leave out samples that do not count."""

    def __init__(
        self,
        batch: Batch,
        num_parts: int,
        *,
        want_gradient: bool,
        link: Communicator | None = None,
        sizes: Sequence[int] = (),
        begins_on: torch.device | None = None,
    ) -> None:
        """``begins_on``: device of the sums until :meth:`move`; None: the batch's device."""
        self.batch = batch
        self._link, self._sizes = link, sizes
        rows, width = batch.features_BD.shape
        compute, device = batch.arithmetic.compute, begins_on or batch.arithmetic.device
        self.sums = PartialSums(
            target_rows_BD=torch.zeros_like(batch.features_BD, device=device),
            shift_PB=torch.full((num_parts, rows), NO_LOGIT, dtype=compute, device=device) if batch.shifted else None,
            sum_PB=torch.zeros(num_parts, rows, dtype=torch.float64, device=device),
            weighted_PBD=_zeros(num_parts, rows, width, compute, device) if want_gradient else None,
            row_sum_PD=torch.zeros(num_parts, width, dtype=torch.float64, device=device) if batch.smoothing else None,
            highest_PB=torch.full((num_parts, rows), NO_LOGIT, dtype=compute, device=device)
            if batch.notes_highest
            else None,
        )

    @property
    def parts(self) -> list[PartialSums]:
        """The sums part by part, in the same memory."""
        return [self.sums.part(number) for number in range(len(self.sums.sum_PB))]

    def move(self) -> None:
        """Move the sums to the batch's device, in one copy."""
        values = vars(self.sums)
        there = {name: tensor for name, tensor in values.items() if tensor is not None}
        moved = upload_together(list(there.values()), self.batch.arithmetic.device)
        self.sums = PartialSums(**(values | dict(zip(there, moved, strict=True))))

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """Return losses of the rank's own samples [S] and each one's feature gradient [S, D]; fill in the batch."""
        losses_S, part_BD = self.finish_part()
        if part_BD is None or self._link is None:
            return losses_S, None if part_BD is None else own_gradient(self.batch, part_BD, self.own)
        return losses_S, own_gradient(self.batch, self._link.sum_to_owners(part_BD, self._sizes), self.own)

    def finish_part(self) -> tuple[Tensor, Tensor | None]:
        """Do :meth:`finish` up to the reduce-scatter: return this rank's part of every sample's gradient [B, D].

        Their sum over the ranks is the argument of :func:`own_gradient`.
        """
        batch, own, sums = self.batch, self.own, self.sums
        shift_B, sum_B, weighted_BD = self._joint()
        cos_B = (batch.features_BD * sums.target_rows_BD).sum(1)
        mean_row_D, means = None, []
        if sums.row_sum_PD is not None:  # this rank's part of the mean of the (unit) rows of all classes
            mean_row_D = (sums.row_sum_PD.sum(0) / max(1.0, batch.spread_over)).to(batch.arithmetic.compute)
            means = [batch.features_BD @ mean_row_D * batch.scale]
        highest_B = None if sums.highest_PB is None else sums.highest_PB.amax(0)
        joint_B, (sum_B, joint_cos_B, *means), highest_B = joint_sums(
            self._link, shift_B, sum_B, [cos_B, *means], exp=torch.exp2, shifted=batch.shifted, highest_B=highest_B
        )
        cos_B, means = joint_cos_B.to(cos_B.dtype), [mean.to(cos_B.dtype) for mean in means]
        if highest_B is None and batch.shift_is_highest:
            highest_B = joint_B
        batch.target_B, batch.highest_B = cos_B[own], None if highest_B is None else highest_B[own] / batch.logit_factor
        # Where only the target is active it may lie far below 0, beside which its exponential would vanish.
        shift_B = torch.where(sum_B == 0, NO_LOGIT, shift_B)
        target = batch.target_logits(cos_B)
        target2_B = target.logits_B * LOG2_E
        # float64: rounded, a log-sum-exp of 900 is off by 3e-5, and so would be the sum of the probabilities.
        lse2_B = torch.logaddexp2(joint_B + torch.log2(sum_B), target2_B)
        batch.lse2_B = lse2_B.to(cos_B.dtype)
        batch.losses_B = batch.record_target_weights(target, (lse2_B - target2_B) / LOG2_E, *means)
        if weighted_BD is None:
            return batch.losses_B[own], None
        gradient_BD = weighted_BD.mul_(torch.exp2(shift_B - lse2_B).to(cos_B.dtype).unsqueeze(1))
        gradient_BD.addcmul_(sums.target_rows_BD, batch.target_weight_B.unsqueeze(1))
        if mean_row_D is not None:
            gradient_BD.sub_(mean_row_D * batch.smoothing)
        return batch.losses_B[own], gradient_BD

    @property
    def own(self) -> slice:
        """Slice of this rank's samples in the batch."""
        if self._link is None:
            return slice(None)
        first = sum(self._sizes[: self._link.rank])
        return slice(first, first + self._sizes[self._link.rank])

    def _joint(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (shift [B], sum [B], weighted sum [B, D]) over all parts."""
        sums = self.sums
        shift_B = torch.zeros_like(self.batch.features_BD[:, 0]) if sums.shift_PB is None else sums.shift_PB.amax(0)
        sums.lift(shift_B)
        if sums.weighted_PBD is None:
            return shift_B, sums.sum_PB.sum(0), None
        for weighted_BD in sums.weighted_PBD[1:]:
            sums.weighted_PBD[0] += weighted_BD
        return shift_B, sums.sum_PB.sum(0), sums.weighted_PBD[0]


def _zeros(parts: int, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros [P, B, D]. On a CPU PyTorch would wake all its threads, which then spin on cores the passes need."""
    values_PBD = torch.empty(parts, rows, width, dtype=dtype, device=device)
    if device.type != "cpu":
        return values_PBD.zero_()
    values_PBD.numpy().fill(0)
    return values_PBD


def own_gradient(batch: Batch, summed_SD: Tensor, own: slice) -> Tensor:
    """Return the gradients of losses by this rank's features, at ``own`` in the batch, from the sum over ranks; in
    place.

    The sum is the gradient by x̂; the batch has that by |x|.
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
