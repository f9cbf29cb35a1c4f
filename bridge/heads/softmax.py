"""The softmax of a class head, chunk by chunk: loss and feature gradient in one pass, row gradients in another.

Neither a logits matrix nor a gradient of all rows exists. The forward pass keeps, per sample, a sum of exp(logit −
shift) and the same sum weighted by the rows (an online log-sum-exp; Milakov and Gimelshein 2018, FlashAttention). The
target column is left out of both and added at the end with the derivative of its margin. The row pass computes each
chunk's probabilities again, or takes them from the forward pass where they were kept.

With x̂, ŵ of unit length, cos = x̂·ŵ, p = softmax and g_bj = dloss/dcos_bj:
    dloss/dx̂_b = Σ_j g_bj ŵ_j          dx = (dx̂ − (dx̂·x̂) x̂) / |x|
    dloss/dŵ_j = Σ_b g_bj x̂_b          dw = (dŵ − (dŵ·ŵ) ŵ) / |w|
Legend: B samples, D width, N rows of one chunk. Statistics are in the compute dtype (float32, or float64 for float64
features); matrix products are in the matmul dtype (the same, or that of autocast).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.specs import Ids
from geartrain.bridge.heads.margins import CombinedMargin
from geartrain.bridge.heads.scratch import Scratch

NORM_FLOOR = 1e-12
"""Lengths below this count as this, as in ``torch.nn.functional.normalize``."""

_UNSHIFTED_LIMIT = 84.0
"""exp(logit), their sum and their products stay normal float32 numbers while scale + log(rows) is below this."""


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    """Where and in which types a pass computes."""

    device: torch.device
    compute: torch.dtype
    """Of statistics, sums and gradients."""
    matmul: torch.dtype
    """Of the operands of the large products."""
    scratch: Scratch

    @staticmethod
    def of(features: Tensor, scratch: Scratch) -> Arithmetic:
        """The types that ``features`` and the current autocast state ask for."""
        kind = features.device.type
        compute = torch.float64 if features.dtype == torch.float64 else torch.float32
        matmul = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else compute
        return Arithmetic(device=features.device, compute=compute, matmul=matmul, scratch=scratch)

    def empty(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Scratch tensor in the compute dtype (or ``dtype``)."""
        return self.scratch.view(name, shape, dtype or self.compute, self.device)

    def narrow(self, name: str, tensor: Tensor) -> Tensor:
        """``tensor`` as an operand of a product."""
        if tensor.dtype == self.matmul:
            return tensor
        narrowed: Tensor = self.empty(name, *tensor.shape, dtype=self.matmul).copy_(tensor)
        return narrowed

    def load_rows(self, rows_ND: Tensor, *, blocking: bool) -> Tensor:
        """The rows on the device in the compute dtype: themselves if they are so already, else a scratch copy."""
        if rows_ND.device == self.device and rows_ND.dtype == self.compute:
            return rows_ND
        loaded_ND = self.empty("rows", *rows_ND.shape)
        loaded_ND.copy_(rows_ND, non_blocking=not blocking)
        return loaded_ND


def normalise_(rows_ND: Tensor) -> Tensor:
    """Scale each row to unit length in place; return the inverse lengths [N]."""
    inverse_N = torch.linalg.vector_norm(rows_ND, dim=1).clamp_(min=NORM_FLOOR).reciprocal_()
    rows_ND.mul_(inverse_N.unsqueeze(1))
    return inverse_N


class Targets:
    """Finds the samples whose target row lies in a chunk."""

    def __init__(self, positions_B: Ids, device: torch.device) -> None:
        self._order = np.argsort(positions_B, kind="stable")
        self._sorted = positions_B[self._order]
        self._device = device

    def within(self, start: int, stop: int) -> tuple[Tensor, Tensor] | None:
        """(samples, rows counted from ``start``), int64, of the targets at positions ``start`` … ``stop`` − 1."""
        low, high = np.searchsorted(self._sorted, (start, stop))
        if low == high:
            return None
        samples = torch.from_numpy(self._order[low:high]).to(self._device)
        return samples, torch.from_numpy(self._sorted[low:high] - start).to(self._device)


@dataclass(kw_only=True)
class Batch:
    """One batch as the passes see it: O(B·D) numbers, enough to make the gradient of any row."""

    arithmetic: Arithmetic
    margin: CombinedMargin | None
    targets: Targets
    features_BD: Tensor
    """x̂ (x without a margin), compute dtype."""
    inverse_lengths_B: Tensor | None
    """1 / |x|; None without a margin."""
    shifted: bool
    """Whether exponents are shifted by the running maximum; if not, exp(logit) itself stays in range."""
    lse_B: Tensor = field(init=False)
    """Log-sum-exp of the logits."""
    target_weight_B: Tensor = field(init=False)
    """dloss_b/dcos of the target, divided by the scale."""

    @staticmethod
    def of(
        features_BD: Tensor, positions_B: Ids, margin: CombinedMargin | None, num_rows: int, arithmetic: Arithmetic
    ) -> Batch:
        """Prepare a batch whose targets are at ``positions_B`` of ``num_rows`` active rows."""
        unit_BD = features_BD.detach().to(arithmetic.compute)
        inverse_B = None
        if margin is not None:
            unit_BD = unit_BD.clone() if unit_BD.data_ptr() == features_BD.data_ptr() else unit_BD
            inverse_B = normalise_(unit_BD)
        fits = margin is not None and margin.scale + math.log(num_rows) < _UNSHIFTED_LIMIT
        return Batch(
            arithmetic=arithmetic,
            margin=margin,
            targets=Targets(positions_B, arithmetic.device),
            features_BD=unit_BD.contiguous(),
            inverse_lengths_B=inverse_B,
            shifted=not fits or arithmetic.matmul == torch.float16,
        )

    @property
    def size(self) -> int:
        """B."""
        return len(self.features_BD)

    @property
    def divisor(self) -> int:
        """What sums over the batch are divided by: B, or 1 for the empty batch of a rank without samples."""
        return max(1, self.size)

    @property
    def scale(self) -> float:
        """Factor between cosines and logits."""
        return 1.0 if self.margin is None else self.margin.scale

    def query(self) -> Tensor:
        """scale · x̂ [B, D] in the matmul dtype: its product with unit rows is the logits."""
        return (self.features_BD * self.scale).to(self.arithmetic.matmul)

    def key(self) -> Tensor:
        """x̂ [B, D] in the matmul dtype, weighted such that exponentials · key is Σ_b p_bj x̂_b."""
        if self.shifted:
            return self.features_BD.to(self.arithmetic.matmul)
        return (self.features_BD * torch.exp(-self.lse_B).unsqueeze(1)).to(self.arithmetic.matmul)


def logits_into(query_BD: Tensor, operand_ND: Tensor, out_BN: Tensor, arithmetic: Arithmetic) -> Tensor:
    """Write the logits [B, N] of one chunk of unit rows to ``out_BN``, in the compute dtype."""
    if operand_ND.dtype == out_BN.dtype:
        return torch.mm(query_BD, operand_ND.t(), out=out_BN)
    narrow_BN = arithmetic.empty("narrow logits", *out_BN.shape, dtype=operand_ND.dtype)
    return out_BN.copy_(torch.mm(query_BD, operand_ND.t(), out=narrow_BN))


class OnlineSoftmax:
    """Running sums over the chunks of the forward pass."""

    def __init__(self, batch: Batch, *, want_gradient: bool) -> None:
        rows, width = batch.features_BD.shape
        compute, device = batch.arithmetic.compute, batch.arithmetic.device
        self.batch = batch
        self.query_BD = batch.query()
        self.shift_B: Tensor | None = None
        self.sum_B = torch.zeros(rows, dtype=torch.float64, device=device)
        self.weighted_BD = torch.zeros(rows, width, dtype=compute, device=device) if want_gradient else None
        self.target_rows_BD = torch.zeros(rows, width, dtype=compute, device=device)

    def add(self, unit_ND: Tensor, start: int, logits_BN: Tensor) -> None:
        """Take in the chunk whose first row is at position ``start``; ``logits_BN`` is overwritten by exponentials."""
        arithmetic = self.batch.arithmetic
        operand_ND = arithmetic.narrow("narrow rows", unit_ND)
        logits_into(self.query_BD, operand_ND, logits_BN, arithmetic)
        if self.batch.shifted:
            self._raise_shift(logits_BN)
        logits_BN.exp_()
        found = self.batch.targets.within(start, start + len(unit_ND))
        if found is not None:
            samples, columns = found
            self.target_rows_BD[samples] = unit_ND[columns]
            logits_BN[samples, columns] = 0
        self.sum_B += logits_BN.sum(1)
        if self.weighted_BD is not None:
            exponentials = arithmetic.narrow("narrow exponentials", logits_BN)
            if exponentials.dtype == self.weighted_BD.dtype:
                self.weighted_BD.addmm_(exponentials, operand_ND)
            else:
                self.weighted_BD += torch.mm(exponentials, operand_ND)

    def _raise_shift(self, logits_BN: Tensor) -> None:
        highest_B = logits_BN.amax(1)
        if self.shift_B is not None:
            highest_B = torch.maximum(highest_B, self.shift_B)
            shrink_B = torch.exp(self.shift_B - highest_B)
            self.sum_B *= shrink_B
            if self.weighted_BD is not None:
                self.weighted_BD *= shrink_B.unsqueeze(1)
        self.shift_B = highest_B
        logits_BN.sub_(highest_B.unsqueeze(1))

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """Return the mean loss (0-dim) and its gradient with respect to the features [B, D]; fill in the batch."""
        batch = self.batch
        shift_B = torch.zeros_like(batch.features_BD[:, 0]) if self.shift_B is None else self.shift_B
        cos_B = (batch.features_BD * self.target_rows_BD).sum(1)
        if batch.margin is None:
            target_B, slope_B = cos_B, torch.ones_like(cos_B)
        else:
            target_B, slope_B = batch.margin.target(cos_B)
        highest_B = torch.maximum(shift_B, target_B)
        total_B = self.sum_B * torch.exp(shift_B - highest_B) + torch.exp(target_B - highest_B)
        batch.lse_B = (highest_B + torch.log(total_B)).to(cos_B.dtype)
        batch.target_weight_B = torch.expm1(target_B - batch.lse_B) * slope_B / batch.scale
        loss = (batch.lse_B - target_B).sum() / batch.divisor
        if self.weighted_BD is None:
            return loss, None
        weight_B = torch.exp(shift_B - batch.lse_B)
        gradient_BD = self.weighted_BD.mul_(weight_B.unsqueeze(1))
        gradient_BD.addcmul_(self.target_rows_BD, batch.target_weight_B.unsqueeze(1))
        gradient_BD.mul_(batch.scale / batch.divisor)
        if batch.inverse_lengths_B is not None:
            x_BD = batch.features_BD
            gradient_BD.sub_(x_BD * (gradient_BD * x_BD).sum(1, keepdim=True)).mul_(
                batch.inverse_lengths_B.unsqueeze(1)
            )
        return loss, gradient_BD


@dataclass(frozen=True)
class KeptExponentials:
    """Exponentials [B, N] of one chunk from the forward pass, and the shift [B] they were taken with."""

    values_BN: Tensor
    shift_B: Tensor | None


class RowGradientPass:
    """Makes Σ_b p'_bj x̂_b for chunk after chunk of one batch, where p' is dloss_b/dlogit."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._query_BD = batch.query()
        self._key_BD = batch.key()
        self._targets_BD = batch.features_BD * batch.target_weight_B.unsqueeze(1)

    def chunk(self, unit_ND: Tensor, start: int, kept: KeptExponentials | None = None) -> Tensor:
        """Gradient [N, D] of the unit rows, without the factor scale / B; scratch, read it before the next chunk."""
        batch, arithmetic = self.batch, self.batch.arithmetic
        found = batch.targets.within(start, start + len(unit_ND))
        key_BD = self._key_BD
        if kept is None:
            exponentials_BN = self._exponentials(unit_ND, found)
        else:
            exponentials_BN = kept.values_BN
            if kept.shift_B is not None:
                weight_B = torch.exp(kept.shift_B - batch.lse_B)
                key_BD = (batch.features_BD * weight_B.unsqueeze(1)).to(arithmetic.matmul)
        operand_BN = arithmetic.narrow("narrow exponentials", exponentials_BN)
        out_ND = arithmetic.empty("unit gradient", *unit_ND.shape)
        if operand_BN.dtype == out_ND.dtype:
            torch.mm(operand_BN.t(), key_BD, out=out_ND)
        else:
            narrow_ND = arithmetic.empty("narrow gradient", *unit_ND.shape, dtype=operand_BN.dtype)
            out_ND.copy_(torch.mm(operand_BN.t(), key_BD, out=narrow_ND))
        if found is not None:
            samples, rows = found
            out_ND.index_add_(0, rows, self._targets_BD[samples])
        return out_ND

    def _exponentials(self, unit_ND: Tensor, found: tuple[Tensor, Tensor] | None) -> Tensor:
        batch, arithmetic = self.batch, self.batch.arithmetic
        operand_ND = arithmetic.narrow("narrow rows", unit_ND)
        out_BN = arithmetic.empty("logits", batch.size, len(unit_ND))
        logits_into(self._query_BD, operand_ND, out_BN, arithmetic)
        if batch.shifted:
            out_BN.sub_(batch.lse_B.unsqueeze(1))
        out_BN.exp_()
        if found is not None:
            out_BN[found] = 0
        return out_BN


def fold_normalisation_(
    unit_ND: Tensor, inverse_N: Tensor | None, gradient_ND: Tensor, factor: Tensor, arithmetic: Arithmetic
) -> None:
    """Overwrite unit rows by the gradient of the rows: factor · (g − (g·ŵ) ŵ) / |w|, or factor · g without a margin.

    ``factor`` is 0-dim, on the device.
    """
    if inverse_N is None:
        torch.mul(gradient_ND, factor, out=unit_ND)
        return
    weight_N = inverse_N * factor
    product_ND = torch.mul(gradient_ND, unit_ND, out=arithmetic.empty("product", *unit_ND.shape))
    unit_ND.mul_((-product_ND.sum(1) * weight_N).unsqueeze(1)).addcmul_(gradient_ND, weight_N.unsqueeze(1))


def chunk_bounds(num_rows: int, chunk_rows: int) -> Iterator[tuple[int, int]]:
    """(start, stop) of consecutive chunks that cover ``num_rows``."""
    for start in range(0, num_rows, chunk_rows):
        yield start, min(start + chunk_rows, num_rows)


def chunk_rows_for(batch: int, dim: int, device: torch.device) -> int:
    """Rows of a chunk such that its logits and its rows stay in a CPU's cache (2 MiB), or fill a GPU (64 MiB)."""
    budget_bytes = (2 if device.type == "cpu" else 64) << 20
    return max(256, min(1 << 20, budget_bytes // (4 * max(batch, dim, 1))))
