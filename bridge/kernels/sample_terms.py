"""What a class head does for each sample beside the products over rows: many small operations, in a few starts.

Their references are the tensor operations of ``head/batch.py``, ``head/loss/softmax.py`` and ``device_labels.py``,
which go on to compute whatever has no kernel here: ask :func:`~.launch.runs_kernels` first.

Legend: B samples, S of this rank, A active rows, D width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from geartrain.bridge.kernels.head import HeadPass
from geartrain.bridge.kernels.launch import Cost, launch


class PreparedLabels(NamedTuple):
    """See :func:`prepare_labels`."""

    labels_B: Tensor
    """int64: those that count, and in the place of each other the largest of these (0 where none counts)."""
    counts_B: Tensor
    """float32: 1 where the sample counts, 0 where it is ignored, NaN where its label is of no class."""
    num_counted: Tensor
    """float32 (0-dim): the sum of ``counts_B``."""
    divisor: Tensor
    """float32 (0-dim): how many samples count, or 1."""
    rank_divisor: Tensor
    """float32 (0-dim): the same divided by the number of ranks."""
    positions_B: Tensor | None
    """int64: the label's row of this rank; −1: elsewhere, or the sample does not count. None: not looked for."""


def prepare_labels(
    labels_B: Tensor, num_classes: int, ignored: int | None, first: int, num_local: int, num_ranks: int
) -> PreparedLabels:
    """Check labels int64 [B] of ``num_classes``, of which this rank has ``num_local`` from ``first`` on."""
    from geartrain.bridge.kernels.triton import sample_terms as kernels

    counts_B = torch.empty_like(labels_B, dtype=torch.float32)
    sums = counts_B.new_empty(()), counts_B.new_empty(()), counts_B.new_empty(())
    made = PreparedLabels(torch.empty_like(labels_B), counts_B, *sums, torch.empty_like(labels_B))
    launch(
        kernels.prepare_labels,
        (1,),
        labels_B,
        *made,
        len(labels_B),
        num_classes,
        ignored,
        first,
        num_local,
        num_ranks,
        BLOCK=1024,
        num_warps=8,
        cost=Cost(36.0 * len(labels_B)),
    )
    return made


def find_rows(wanted_B: Tensor, numbers_A: Tensor, count: Tensor | None) -> Tensor:
    """Where each of row numbers int64 [B] is among ``numbers_A``, rising, the first ``count`` of them; −1: nowhere."""
    from geartrain.bridge.kernels.triton import sample_terms as kernels

    out_B = torch.empty_like(wanted_B)
    launch(
        kernels.find_rows,
        (-(-len(wanted_B) // 128),),
        wanted_B,
        numbers_A,
        count,
        out_B,
        len(wanted_B),
        len(numbers_A),
        BITS=max(1, len(numbers_A).bit_length()),
        BLOCK=128,
        num_warps=4,
        cost=Cost(16.0 * len(wanted_B) * (1 + len(numbers_A).bit_length())),
    )
    return out_B


def sampled_weight(labels_B: Tensor, num_active: int, num_live_classes: int) -> Tensor:
    """``SamplingCorrection.log2_weight`` (0-dim, float32) for labels on a device, of which some may be equal."""
    from geartrain.bridge.kernels.triton import sample_terms as kernels

    out = torch.empty((), dtype=torch.float32, device=labels_B.device)
    numbers = len(labels_B), num_active, num_live_classes
    cost = Cost(16.0 * len(labels_B))
    launch(kernels.sampled_weight, (1,), labels_B.sort().values, out, *numbers, BLOCK=1024, num_warps=8, cost=cost)
    return out


def prepare_features(
    features_BD: Tensor, counts_B: Tensor | None, *, unit: bool, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(features float32 [B, D], ``unit``: of unit length; 1 / lengths [B], or None; ``factor`` · these as ``dtype``).

    Features that do not count become 0.
    """
    from geartrain.bridge.kernels.triton import sample_terms as kernels

    batch, dim = features_BD.shape
    features_BD = features_BD.contiguous()
    out_BD = torch.empty_like(features_BD, dtype=torch.float32)
    queries_BD = torch.empty_like(features_BD, dtype=dtype)
    inverse_B = out_BD.new_empty(batch) if unit else None
    launch(
        kernels.prepare_features,
        (batch,),
        features_BD,
        counts_B,
        out_BD,
        inverse_B,
        queries_BD,
        factor,
        DIM=dim,
        **kernels.row_options(dim),
        cost=Cost(float(features_BD.nbytes + out_BD.nbytes + queries_BD.nbytes)),
    )
    return out_BD, inverse_B, queries_BD


def own_cosines(head: HeadPass, features_BD: Tensor) -> tuple[Tensor, Tensor]:
    """(``head.own_rows()`` float32 [B, D], their products with the features [B])."""
    from geartrain.bridge.kernels.triton import sample_terms as kernels

    out_BD, cos_B = torch.empty_like(features_BD), features_BD.new_empty(len(features_BD))
    launch(
        kernels.own_cosines,
        (len(features_BD),),
        head.bits_LD,
        head.scales_LK if head.logit_limit is None else None,
        head.numbers_A,
        None if head.logit_limit is None else head.inverse_A,
        head.positions_B,
        features_BD,
        out_BD,
        cos_B,
        DIM=head.dim,
        **kernels.row_options(head.dim),
        cost=Cost(float(2 * features_BD.nbytes + features_BD.numel() * head.rows_LD.itemsize)),
    )
    return out_BD, cos_B


def scale_sums(sum_B: Tensor, shift_B: Tensor | None, top_B: Tensor | None, cos_B: Tensor) -> Tensor:
    """float64 [2, B] to be summed over ranks: Σ exp2(logit − shift) under ``top_B`` (None: all have one shift), and
    cosines."""
    from geartrain.bridge.kernels.triton import sample_terms as kernels

    joint_XB = cos_B.new_empty(2, len(cos_B), dtype=torch.float64)
    launch(
        kernels.scale_sums,
        (-(-len(cos_B) // 128),),
        sum_B,
        shift_B,
        top_B,
        cos_B,
        joint_XB,
        len(cos_B),
        BLOCK=128,
        num_warps=4,
        cost=Cost(36.0 * len(cos_B)),
    )
    return joint_XB


class TargetAngle(NamedTuple):
    """A margin whose target logit is ``scale`` · (ψ(θ + m2) − m3)."""

    scale: float
    m2: float
    m3: float


class Losses(NamedTuple):
    """See :func:`losses`; all float32 [B]."""

    losses_B: Tensor
    lse2_B: Tensor
    target_weight_B: Tensor
    """dloss/dcos of the target, over the scale."""
    coefficients_B: Tensor
    """What turns a sum of exp2(logit − this rank's shift) into one of probabilities."""


def losses(
    cos_B: Tensor,
    sum_B: Tensor,
    joint_B: Tensor | None,
    shift_B: Tensor | None,
    middle: float,
    counts_B: Tensor | None,
    margin: TargetAngle | None,
) -> Losses:
    """Cross entropy from ``sum_B`` = Σ exp2(logit − ``joint_B``) over the other classes of all ranks.

    ``cos_B`` are cosines of the targets (None for a margin: their logits), ``shift_B`` this rank's own shift; of
    neither: both are ``middle``. Sums may be float64, all else is float32. Losses are multiplied by ``counts_B``.
    """
    from geartrain.bridge.kernels.triton import sample_terms as kernels

    made = Losses(*(torch.empty_like(cos_B) for _ in range(4)))
    scale, m2, m3 = margin or TargetAngle(1.0, 0.0, 0.0)
    launch(
        kernels.losses,
        (-(-len(cos_B) // 128),),
        cos_B,
        sum_B,
        joint_B,
        shift_B,
        counts_B,
        *made,
        len(cos_B),
        middle,
        scale,
        math.cos(m2),
        math.sin(m2),
        m3,
        HAS_MARGIN=margin is not None,
        BLOCK=128,
        num_warps=4,
        cost=Cost(36.0 * len(cos_B)),
    )
    return made


def finish_gradient(
    gradient_PBD: Tensor,
    own: tuple[Tensor, Losses] | None,
    features_BD: Tensor | None = None,
    inverse_B: Tensor | None = None,
    counts_B: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """What P parts add up to [B, D], in their memory; times ``scale``.

    ``own`` (classes' rows [B, D]): the parts are Σ exp2(logit − shift) · ŵ of the others, and become Σ p · ŵ of all.
    ``inverse_B``: from gradients by unit features make those by features. 0 where samples do not count.
    """
    from geartrain.bridge.kernels.triton import sample_terms as kernels

    own_BD, made = own or (None, None)
    parts, batch, dim = gradient_PBD.shape
    launch(
        kernels.finish_gradient,
        (batch,),
        gradient_PBD,
        own_BD,
        None if made is None else made.coefficients_B,
        None if made is None else made.target_weight_B,
        features_BD,
        inverse_B,
        counts_B,
        batch,
        parts,
        scale,
        DIM=dim,
        **kernels.row_options(dim),
        cost=Cost(4.0 * batch * dim * (1 + parts + (own_BD is not None) + (inverse_B is not None))),
    )
    return gradient_PBD[0]


def row_factors(
    upstream: Tensor,
    ends_R: Tensor | None,
    scale: float,
    num_counted: Tensor | None,
    lse2_B: Tensor,
    target_weight_B: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Of the rows' gradients: factor (0-dim) and weights [B] of at most 1 (None: 1), as ``Batch.row_factors`` has them,
    and a number that is finite only if they are; float32.

    ``upstream``, times ``scale``: the derivative by the mean loss (0-dim), by each sample's [B], or of ranks [R] by the
    mean, whose samples end at ``ends_R``. Those by means are divided by ``num_counted``, or 1.
    """
    from geartrain.bridge.kernels.triton import sample_terms as kernels

    factor, checksum = lse2_B.new_empty(()), lse2_B.new_empty(())
    weights_B = torch.empty_like(lse2_B) if upstream.ndim else None
    launch(
        kernels.row_factors,
        (1,),
        upstream.contiguous(),
        ends_R,
        num_counted,
        lse2_B,
        target_weight_B,
        factor,
        weights_B,
        checksum,
        len(lse2_B),
        0 if ends_R is None else len(ends_R),
        scale,
        OF_SAMPLES=upstream.ndim > 0 and ends_R is None,
        BLOCK=1024,
        num_warps=8,
        cost=Cost(20.0 * len(lse2_B)),
    )
    return factor, weights_B, checksum
