"""The row pass of a class head: the gradient of each row, chunk by chunk, from what the forward pass learned.

With g_bj = dloss/dcos_bj (formulas of ``softmax.py``):
    dloss/dŵ_j = Σ_b g_bj x̂_b,   dloss/dw = (dŵ − (dŵ·ŵ) ŵ) / |w|
A chunk's probabilities are computed again, or taken from the forward pass where their exponentials were kept.
Legend: B samples, D width, N rows of one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from geartrain.bridge.heads.batch import Batch, Workspace


@dataclass(frozen=True)
class KeptExponentials:
    """Exponentials [N, B] of one chunk from the forward pass, and the shift [B] they were taken with."""

    values_NB: Tensor
    shift_B: Tensor | None


class RowPass:
    """Makes Σ_b p'_bj x̂_b for the chunks of one batch, where p' is dloss_b/dlogit. Threads may share it."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._query_BD = batch.query()
        self._key_BD = batch.key()
        self._targets_BD = batch.features_BD * batch.target_weight_B.unsqueeze(1)

    def chunk(self, work: Workspace, unit_ND: Tensor, start: int, kept: KeptExponentials | None = None) -> Tensor:
        """Gradient [N, D] of the unit rows, without the factor scale / B; scratch, read it before the next chunk."""
        batch = self.batch
        found = batch.targets.within(start, start + len(unit_ND))
        key_BD = self._key_BD
        if kept is None:
            exponentials_NB = self._exponentials(work, unit_ND)
            if found is not None:
                samples, rows = found
                exponentials_NB[rows, samples] = 0
        else:
            exponentials_NB = kept.values_NB
            if kept.shift_B is not None:
                key_BD = batch.features_BD * torch.exp2(kept.shift_B - batch.lse2_B).unsqueeze(1)
        operand_NB = work.narrow("narrow exponentials", exponentials_NB)
        gradient_ND = work.product("unit gradient", operand_NB, key_BD)
        if found is not None:
            samples, rows = found
            gradient_ND.index_put_((rows,), self._targets_BD[samples], accumulate=True)
        return gradient_ND

    def _exponentials(self, work: Workspace, unit_ND: Tensor) -> Tensor:
        operand_ND = work.narrow("narrow rows", unit_ND)
        out_NB = work.product("logits", operand_ND, self._query_BD.t())
        if self.batch.shifted:
            out_NB.sub_(self.batch.lse2_B)
        return out_NB.exp2_()


def fold_normalisation_(
    work: Workspace, unit_ND: Tensor, inverse_N: Tensor | None, gradient_ND: Tensor, factor: Tensor
) -> None:
    """Overwrite unit rows by the gradient of the rows: factor · (g − (g·ŵ) ŵ) / |w|, or factor · g without a margin.

    ``factor`` is 0-dim, on the device.
    """
    if inverse_N is None:
        torch.mul(gradient_ND, factor, out=unit_ND)
        return
    weight_N = inverse_N * factor
    product_ND = torch.mul(gradient_ND, unit_ND, out=work.empty("product", *unit_ND.shape))
    unit_ND.mul_((-product_ND.sum(1) * weight_N).unsqueeze(1)).addcmul_(gradient_ND, weight_N.unsqueeze(1))
