"""The softmax of a class head whose rows are on several ranks: local sums, then one maximum and one sum over the ranks.

Of a [B, C] matrix of logits only three numbers a sample travel (PLSC, section 2; partial FC): the largest logit, the
sum of exponentials and the cosine of the target, which one rank has.

Legend: B samples of all ranks, D width, n of them this rank's own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from geartrain.ams.programs.class_head import LOG2_E
from geartrain.bridge.collectives.link import RankLink
from geartrain.bridge.head.batch import Batch
from geartrain.bridge.head.loss.softmax import OnlineSoftmax, shift_beside_target, through_normalisation


class RankSoftmax(OnlineSoftmax):
    """Sums over the rows of this rank for the samples of all ranks.

    Collectives: an all-reduce of B numbers (where exponents are shifted), one of 2·B (3·B with smoothed labels), and
    the reduce-scatter of B·D for the feature gradients.
    """

    def __init__(
        self, batch: Batch, num_parts: int, *, want_gradient: bool, link: RankLink, sizes: Sequence[int]
    ) -> None:
        super().__init__(batch, num_parts, want_gradient=want_gradient)
        self._link = link
        self._sizes = sizes

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """Losses of the rank's own samples [S], each one's gradient by its features [S, D]; fill in the batch."""
        losses_S, part_BD = self.finish_part()
        if part_BD is None:
            return losses_S, None
        return losses_S, own_gradient(self._batch, self._link.sum_to_owners(part_BD, self._sizes), self._own())

    def finish_part(self) -> tuple[Tensor, Tensor | None]:
        """:meth:`finish` before the reduce-scatter: what this rank's rows add to every sample's gradient [B, D].

        The sum over the ranks is what :func:`own_gradient` takes.
        """
        batch, link = self._batch, self._link
        shift_B, sum_B, weighted_BD = self._joint()
        largest = [shift_B] if batch.shifted else []
        if self.highest_PB is not None:
            largest.append(self.highest_PB.amax(0))
        joint_largest = link.max(torch.stack(largest)) if largest else None
        highest_B = joint_largest[0] if joint_largest is not None and batch.shifted else shift_B
        cos_B = (batch.features_BD * self.target_rows_BD).sum(1)
        own_sums = [sum_B * torch.exp2(shift_B - highest_B), cos_B.double()]
        mean_row_D = self._mean_row()  # this rank's part of it
        if mean_row_D is not None:
            own_sums.append((batch.features_BD @ mean_row_D * batch.scale).double())
        joint = link.sum(torch.stack(own_sums))
        sum_B, cos_B = joint[0], joint[1].to(cos_B.dtype)
        mean_logits_B = None if mean_row_D is None else joint[2].to(cos_B.dtype)
        shift_B, highest_B = shift_beside_target(shift_B, sum_B), shift_beside_target(highest_B, sum_B)
        target = batch.target_logits(cos_B)
        target2_B = target.logits_B * LOG2_E
        top_B = torch.maximum(highest_B, target2_B)
        total_B = sum_B * torch.exp2(highest_B - top_B) + torch.exp2(target2_B - top_B)
        batch.lse2_B = (top_B + torch.log2(total_B)).to(cos_B.dtype)
        losses_B = batch.take_target_weights(target, (batch.lse2_B - target2_B) / LOG2_E, mean_logits_B)
        own = self._own()
        batch.target_B = cos_B[own]
        if joint_largest is not None and (self.highest_PB is not None or batch.shift_is_highest):
            batch.highest_B = joint_largest[-1][own] / batch.logit_factor
        if weighted_BD is None:
            return losses_B[own], None
        weighted_BD.mul_(torch.exp2(shift_B - batch.lse2_B).unsqueeze(1))
        weighted_BD.addcmul_(self.target_rows_BD, batch.target_weight_B.unsqueeze(1))
        if mean_row_D is not None:
            weighted_BD.sub_(mean_row_D * batch.smoothing)
        return losses_B[own], weighted_BD

    def _own(self) -> slice:
        first = sum(self._sizes[: self._link.rank])
        return slice(first, first + self._sizes[self._link.rank])


def own_gradient(batch: Batch, summed_SD: Tensor, own: slice) -> Tensor:
    """The gradients of losses by this rank's features at ``own`` in the batch, from the sum over ranks; in place."""
    mine = copy.copy(batch)
    mine.features_BD = batch.features_BD[own]
    mine.inverse_lengths_B = None if batch.inverse_lengths_B is None else batch.inverse_lengths_B[own]
    mine.norm_weight_B = None if batch.norm_weight_B is None else batch.norm_weight_B[own]
    return through_normalisation(summed_SD.mul_(batch.scale), mine)
