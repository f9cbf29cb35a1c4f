"""Two passes of a class head over a chunk of rows: the sums of the forward pass, and the gradient of each row.

The second uses results of the first. With g_bj = dloss/dcos_bj (formulas of ``softmax.py``):
    dloss/dŵ_j = Σ_b g_bj x̂_b,   dloss/dw = (dŵ − (dŵ·ŵ) ŵ) / |w|
:class:`CompiledPass` is one walk of C++ (``class_pass_kernels.cpp``) over the chunk, for float32 on a CPU
(``docs/decisions/0007``) and for products in bfloat16 on one with AMX; :class:`TensorPass` is PyTorch, for every other
type and device. Threads may share a pass.
Each center of a class with several is treated as a row whose logits count where it is the nearest one
(``sub_centers.py``).
Legend: A active rows, B samples, D width, K rows kept, N rows of one chunk, S rows of their centers, each [D].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.ams.kernels.ops import ClassPass, has_bfloat16_class_pass
from geartrain.ams.programs.class_head import LOG2_E
from geartrain.bridge.head.loss.batch import Batch, DeviceTargets, Targets, chunk_rows_for, inverse_lengths
from geartrain.bridge.head.loss.softmax import PartialSums
from geartrain.bridge.head.loss.sub_centers import at_centers, nearest_centers
from geartrain.bridge.placements.workspace import Workspace
from geartrain.bridge.rows.gradient_carrier import LEAST_SQUARES


def pass_for(batch: Batch, weights_B: Tensor | None = None) -> ChunkPass:
    """Return the fastest pass for the batch's types and device.

    ``weights_B``, of at most 1, are factors of each sample's part of the row gradients; None: 1.
    """
    arithmetic = batch.arithmetic
    if isinstance(batch.targets, DeviceTargets) or batch.negatives_margin is not None:
        return TensorPass(batch, weights_B)
    is_host = arithmetic.device.type == "cpu" and arithmetic.compute == torch.float32
    in_bfloat16 = arithmetic.matmul == torch.bfloat16 and has_bfloat16_class_pass()
    if is_host and (arithmetic.matmul == torch.float32 or in_bfloat16) and batch.size > 0:
        return CompiledPass(batch, weights_B)
    return TensorPass(batch, weights_B)


def chunk_rows_on(device: torch.device, batch: int, dim: int) -> int:
    """Return the rows of a chunk of the fastest pass on a device."""
    return CompiledPass.chunk_rows if device.type == "cpu" else chunk_rows_for(batch, dim, device)


def parts_for(num_rows: int, batch: int, dim: int) -> int:
    """Return the number of parts, each with its own sums, into which a compiled pass divides all rows.

    So many that threads have even work: up to 32, with 2 MiB of sums in all or 8 parts, and 1,024 rows in each. They do
    not depend on the number of threads, so that no sum does.
    """
    return max(1, min(32, max(8, (2 << 20) // (4 * max(1, batch * dim))), num_rows // 1024))


class CompiledPass:
    """Passes of ``class_pass.hpp``: a tile of rows stays in the cache from its normalisation to its gradient.

    One call can process all rows of a step, by ``threads`` and without Python in between.
    """

    chunk_rows = 3072
    keeps_logits = True
    spreads_operations = False

    def __init__(self, batch: Batch, weights_B: Tensor | None = None) -> None:
        """Take the arguments of :func:`pass_for`."""
        self._batch = batch
        self._common_D = batch.common_gradient(weights_B)
        self._compiled = ClassPass(
            batch.features_BD.numpy(),
            logit_factor=batch.logit_factor,
            normalised=batch.margin is not None,
            bfloat16=batch.arithmetic.matmul == torch.bfloat16,
            weights=None if weights_B is None else weights_B.numpy(),
            centers=batch.centers,
        )

    @property
    def over_all(self) -> CompiledPass:
        """The pass over all chunks at once, which is this pass."""
        return self

    def forward(self, work: Workspace, sums: PartialSums, rows_ND: Tensor, start: int, kept_NB: Tensor | None) -> None:
        """Add a chunk to the sums, as :data:`ChunkPass`."""
        del work
        self.forward_all(sums, rows_ND, start, kept_NB, threads=1)

    def forward_all(
        self, sums: PartialSums, rows_ND: Tensor, start: int, kept_NB: Tensor | None, *, threads: int
    ) -> None:
        """Do :meth:`forward` by ``threads`` threads; several sums take as many of the rows each."""
        targets = self._batch.targets
        assert isinstance(targets, Targets), "a compiled pass is the host's"
        samples, rows = targets.within(start, start + len(rows_ND))
        self._compiled.forward(
            rows_ND.numpy(),
            target_rows=rows,
            target_samples=samples,
            target_out=sums.target_rows_BD.numpy(),
            sum=sums.sum_PB.numpy(),
            threads=threads,
            **_arrays(
                shift=sums.shift_PB,
                weighted=sums.weighted_PBD,
                kept=kept_NB,
                offsets=self._batch.offsets(start, len(rows_ND)),
                row_sum=sums.row_sum_PD,
                highest=sums.highest_PB,
            ),
        )

    def overwrite(
        self, work: Workspace, rows_ND: Tensor, start: int, factor: Tensor, kept_NB: Tensor | None = None
    ) -> Tensor:
        """Overwrite rows by their gradient, as :data:`ChunkPass`."""
        del work
        return self.overwrite_all(rows_ND, start, factor, kept_NB, threads=1)[0]

    def overwrite_all(
        self, rows_ND: Tensor, start: int, factor: Tensor, kept_NB: Tensor | None, *, threads: int
    ) -> tuple[Tensor, Tensor | None]:
        """Do :meth:`overwrite` by ``threads`` threads; also return Σ g² (0-dim, float64; None beyond float32)."""
        batch = self._batch
        targets = batch.targets
        assert isinstance(targets, Targets), "a compiled pass is the host's"
        samples, rows = targets.within(start, start + len(rows_ND))
        check, squares = self._compiled.overwrite(
            rows_ND.numpy(),
            target_rows=rows,
            target_samples=samples,
            log_sum=batch.lse2_B.numpy(),
            target_weight=batch.target_weight_B.numpy(),
            factor=float(factor),
            kept_exponentials=not batch.shifted,
            threads=threads,
            **_arrays(kept=kept_NB, offsets=batch.offsets(start, len(rows_ND)), common=self._common_D),
        )
        holds = LEAST_SQUARES < squares < torch.inf
        norm = torch.tensor(squares, dtype=torch.float64, device="cpu") if holds else None
        return torch.tensor(check, device="cpu"), norm


def _arrays(**tensors: Tensor | None) -> dict[str, npt.NDArray[Any] | None]:
    arrays: dict[str, npt.NDArray[Any] | None] = {}
    for name, tensor in tensors.items():
        arrays[name] = None if tensor is None else tensor.numpy()
    return arrays


_LIFT = 15
"""Power of 2 by which exponentials up to 1 are multiplied for float16, whose normal numbers end at 2^-14."""
_MIN_PROBABILITY = 2.0**-40
"""Least value that counts as the largest of a row's probabilities when they are scaled for float16."""


class TensorPass:
    """Passes by tensor operations.

    float16 holds no number below 6e-8, which is a usual probability among ten million classes. So exponentials are
    multiplied before they are narrowed, in the forward pass by 2^15, in the second for each row so that the largest of
    its probabilities is 2^15; sums are divided again, and the targets' part, which is not narrowed, is scaled alike.
    """

    spreads_operations = True
    over_all = None

    def __init__(self, batch: Batch, weights_B: Tensor | None = None) -> None:
        """Take the arguments of :func:`pass_for`."""
        self._batch = batch
        self._weights_B = weights_B
        self._dim = batch.features_BD.shape[1]
        self._common_D = batch.common_gradient(weights_B)
        arithmetic = batch.arithmetic
        self._lifts = arithmetic.matmul == torch.float16 and batch.size > 0
        self._centers = batch.centers
        self.chunk_rows = max(1, chunk_rows_for(batch.size, self._dim, arithmetic.device) // batch.centers)
        self._negatives_margin = batch.negatives_margin
        can_keep = arithmetic.matmul == arithmetic.compute and self._negatives_margin is None
        self.keeps_logits = can_keep and batch.size > 0
        self._query_BD = (batch.features_BD * batch.logit_factor).to(arithmetic.matmul)
        key_BD = batch.features_BD if weights_B is None else batch.features_BD * weights_B.unsqueeze(1)
        self._key_BD = key_BD.to(arithmetic.matmul)

    def forward(
        self,
        work: Workspace,
        sums: PartialSums,
        rows_ND: Tensor,
        start: int,
        kept_NB: Tensor | None,
    ) -> None:
        """Add a chunk to the sums, as :data:`ChunkPass`."""
        unit_SD, _ = self._unit_rows(work, rows_ND.view(-1, self._dim))
        operand_SD = work.narrow("narrow rows", unit_SD)
        logits_SB = work.product("logits", operand_SD, self._query_BD.t())
        if self._centers > 1 and kept_NB is not None:
            kept_NB.view_as(logits_SB).copy_(logits_SB)
        logits_NB, chosen_NB = self._nearest(logits_SB)
        if sums.row_sum_PD is not None:
            stood_for_N = self._stood_for(start, unit_SD)
            sums.row_sum_PD += unit_SD.sum(0) if stood_for_N is None else stood_for_N @ unit_SD
        found = self._targets(start, len(rows_ND))
        if found is not None:  # they are in no sum, so they must not raise the shift: the others might vanish
            found.at_centers(chosen_NB, self._centers).copy_rows(unit_SD, sums.target_rows_BD)
            found.fill(logits_NB, -torch.inf)
        if sums.highest_PB is not None:
            torch.maximum(sums.highest_PB[0], logits_NB.amax(0), out=sums.highest_PB[0])
        slopes_NB = self._change(logits_NB, start, found)
        if self._centers == 1 and kept_NB is not None:
            kept_NB.copy_(logits_NB)
        if sums.shift_PB is not None:
            highest_B = torch.maximum(logits_NB.amax(0), sums.shift_PB[0])
            sums.lift(highest_B)
            logits_NB.sub_(highest_B - _LIFT if self._lifts else highest_B)
        logits_NB.exp2_()
        unlift = 2.0**-_LIFT if self._lifts else 1.0
        sums.sum_PB[0].add_(logits_NB.sum(0), alpha=unlift)
        if sums.weighted_PBD is None:
            return
        if slopes_NB is not None:
            logits_NB.mul_(slopes_NB)
        operand_SB = work.narrow("narrow exponentials", self._at_centers(logits_NB, chosen_NB))
        weighted_BD = sums.weighted_PBD[0]
        if operand_SB.dtype == weighted_BD.dtype:
            weighted_BD.addmm_(operand_SB.t(), operand_SD)
        else:
            weighted_BD.add_(work.product("part", operand_SB.t(), operand_SD), alpha=unlift)

    def overwrite(
        self,
        work: Workspace,
        rows_ND: Tensor,
        start: int,
        factor: Tensor,
        kept_NB: Tensor | None = None,
    ) -> Tensor:
        """Overwrite rows by their gradient, as :data:`ChunkPass`."""
        batch, rows_SD = self._batch, rows_ND.view(-1, self._dim)
        unit_SD, inverse_S = self._unit_rows(work, rows_SD)
        slopes_NB = None
        if kept_NB is None:
            operand_SD = work.narrow("narrow rows", unit_SD)
            logits_SB = work.product("logits", operand_SD, self._query_BD.t())
        else:
            logits_SB = kept_NB.view(len(rows_SD), batch.size)
        logits_NB, chosen_NB = self._nearest(logits_SB)
        if kept_NB is None or self._centers > 1:
            slopes_NB = self._change(logits_NB, start, None)
        logits_NB.sub_(batch.lse2_B)
        if slopes_NB is not None:  # rounding may move a cosine across a margin's threshold, beyond what the sum holds
            logits_NB.clamp_(max=0.0)
        logits_NB.exp2_()
        if slopes_NB is not None:
            logits_NB.mul_(slopes_NB)
        found = self._targets(start, len(rows_ND))
        if found is not None:
            found.fill(logits_NB, 0.0)
        operand_SB, lift_S = self._lifted(work, self._at_centers(logits_NB, chosen_NB))
        gradient_SD = work.product("unit gradient", operand_SB, self._key_BD)
        if found is not None:  # separately and in the compute dtype: it is the largest part by far
            weight_B = batch.target_weight_B if self._weights_B is None else batch.target_weight_B * self._weights_B
            nearest = found.at_centers(chosen_NB, self._centers)
            nearest.add_weighted(gradient_SD, batch.features_BD, weight_B, lift_S)
        if self._common_D is not None:
            stood_for_N = self._stood_for(start, unit_SD)
            factors = [factor_N for factor_N in (stood_for_N, lift_S) if factor_N is not None]
            times_N = torch.stack(factors).prod(0) if factors else torch.ones_like(gradient_SD[:, 0])
            gradient_SD.addr_(times_N, self._common_D)
        if inverse_S is None:
            factor_S = factor if lift_S is None else (factor / lift_S).unsqueeze(1)
            return torch.mul(gradient_SD, factor_S, out=rows_SD).sum()
        weight_S = inverse_S * factor if lift_S is None else inverse_S / lift_S * factor
        along_S = torch.mul(gradient_SD, unit_SD, out=work.empty("product", *unit_SD.shape)).sum(1)
        torch.mul(unit_SD, (-along_S * weight_S).unsqueeze(1), out=rows_SD)
        return rows_SD.addcmul_(gradient_SD, weight_S.unsqueeze(1)).sum()

    def _unit_rows(self, work: Workspace, rows_SD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (unit rows [S, D], inverse lengths [S]); without a margin the rows themselves and None."""
        if self._batch.margin is None:
            return rows_SD, None
        inverse_S = inverse_lengths(rows_SD)
        return torch.mul(rows_SD, inverse_S.unsqueeze(1), out=work.empty("unit rows", *rows_SD.shape)), inverse_S

    def _nearest(self, logits_SB: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (logits [N, B] of classes, the center of each [N, B]), or with one center the same tensor and None."""
        return (logits_SB, None) if self._centers == 1 else nearest_centers(logits_SB, self._centers)

    def _at_centers(self, values_NB: Tensor, chosen_NB: Tensor | None) -> Tensor:
        return values_NB if chosen_NB is None else at_centers(values_NB, chosen_NB, self._centers)

    def _lifted(self, work: Workspace, probability_SB: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (operand [S, B] of a product, the factor of its rows [S]; None: 1)."""
        if not self._lifts:
            return work.narrow("narrow exponentials", probability_SB), None
        lift_S = 2.0**_LIFT / probability_SB.amax(1).clamp_(min=_MIN_PROBABILITY)
        operand_SB = work.empty("narrow exponentials", *probability_SB.shape, dtype=torch.float16)
        return torch.mul(probability_SB, lift_S.unsqueeze(1), out=operand_SB), lift_S

    def _change(self, logits_NB: Tensor, start: int, left_out: _Found | None) -> Tensor | None:
        """Turn plain logits to base 2 [N, B] into the margin's, with offsets; targets that are left out stay −∞.

        Returns their derivatives by the cosine over the scale, where a margin changes them.
        """
        slopes_NB: Tensor | None = None
        if self._negatives_margin is not None:
            if left_out is not None:  # a margin cannot take an infinite cosine
                left_out.fill(logits_NB, 0.0)
            changed_NB, slopes_NB = self._negatives_margin.negatives(logits_NB.div_(self._batch.logit_factor))
            torch.mul(changed_NB, LOG2_E, out=logits_NB)
            slopes_NB = slopes_NB / self._batch.scale
            if left_out is not None:
                left_out.fill(logits_NB, -torch.inf)
        offsets_N = self._batch.offsets(start, len(logits_NB))
        if offsets_N is not None:
            logits_NB.add_(offsets_N.unsqueeze(1))
        return slopes_NB

    def _stood_for(self, start: int, rows_ND: Tensor) -> Tensor | None:
        """Return the number of classes that each row stands for [N]; None: 1."""
        offsets_N = self._batch.offsets(start, len(rows_ND))
        return None if offsets_N is None else torch.exp2(offsets_N)

    def _targets(self, start: int, num_rows: int) -> _Found | None:
        """Return the targets in a chunk, on the device; None if the host knows that there are none."""
        targets, device = self._batch.targets, self._batch.arithmetic.device
        if isinstance(targets, DeviceTargets):
            rows_B, here_B = targets.rows(start, num_rows)
            return _Found(torch.arange(self._batch.size, device=device), rows_B, here_B)
        found = targets.within_on(device, start, start + num_rows)
        return None if found is None else _Found(*found, None)


@dataclass(frozen=True, eq=False)
class _Found:
    """Samples [b] and rows [b] of a chunk, which are their targets where ``here`` is true (None: everywhere).

    Shapes are fixed: if only the device knows which targets are in the chunk, all samples are processed.
    """

    samples: Tensor
    rows: Tensor
    here: Tensor | None

    def at_centers(self, chosen_NB: Tensor | None, centers: int) -> _Found:
        """Return the same as numbers of centers, given each target's chosen one (None: rows are centers)."""
        if chosen_NB is None:
            return self
        return replace(self, rows=self.rows * centers + chosen_NB[self.rows, self.samples])

    def copy_rows(self, unit_ND: Tensor, target_rows_BD: Tensor) -> None:
        """Copy the targets' rows."""
        found = unit_ND[self.rows]
        if self.here is not None:
            found = torch.where(self.here.unsqueeze(1), found, target_rows_BD)
        target_rows_BD[self.samples] = found

    def fill(self, logits_NB: Tensor, value: float) -> None:
        """Overwrite the targets' logits."""
        if self.here is None:
            logits_NB[self.rows, self.samples] = value
        else:
            logits_NB[self.rows, self.samples] = logits_NB[self.rows, self.samples].masked_fill(self.here, value)

    def add_weighted(self, gradient_ND: Tensor, features_BD: Tensor, weight_B: Tensor, factor_N: Tensor | None) -> None:
        """Add weight · feature of each sample to its target's gradient, times the row's ``factor_N`` (None: 1)."""
        weight = weight_B[self.samples]
        if factor_N is not None:
            weight = weight * factor_N[self.rows]
        weighted = features_BD[self.samples] * weight.unsqueeze(1)
        if self.here is not None:
            weighted.masked_fill_(~self.here.unsqueeze(1), 0.0)
        gradient_ND.index_put_((self.rows,), weighted, accumulate=True)


ChunkPass = CompiledPass | TensorPass
"""Kinds of passes over the chunks of one batch. Rows [N, D] come in the compute dtype, on the features' device.

``forward`` adds the chunk whose first row is at position ``start`` to one part of the sums, and writes its logits to
``kept``. Once the forward pass is finished ``overwrite`` overwrites the rows by their gradient times ``factor`` (0-dim)
/ scale, and returns a sum that is finite only if all of it is (0-dim). ``chunk_rows`` is its best chunk;
``keeps_logits``: whether keeping is faster than recomputing; ``spreads_operations``: whether each of its operations
would use all of PyTorch's threads; ``over_all``: the pass itself if one call can process all rows, else None.
"""
