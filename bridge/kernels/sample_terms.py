"""Work of a class head for each sample, beside the products over rows: many small operations in a few kernels.

Their references are the tensor operations of ``head/loss/batch.py``, ``head/loss/softmax.py`` and
``head/backends/ranks/device_labels.py``, which run where kernels do not: call :func:`~.launch.runs_kernels` first.

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
    """Labels that are checked and ready for a step; made by :func:`prepare_labels`."""

    labels_B: Tensor
    """int64: labels of samples that count; the largest of these in place of others (0 if none counts)."""
    counts_B: Tensor
    """float32: 1 where the sample counts, 0 where it is ignored, NaN where its label is no class."""
    num_counted: Tensor
    """float32 (0-dim): the sum of ``counts_B``."""
    divisor: Tensor
    """float32 (0-dim): number of samples that count, at least 1."""
    rank_divisor: Tensor
    """float32 (0-dim): ``divisor`` over the number of ranks."""
    positions_B: Tensor | None
    """int64: row of the label on this rank; −1: on another rank, or the sample does not count. None: not computed."""


def prepare_labels(
    labels_B: Tensor, num_classes: int, ignored: int | None, first: int, num_local: int, num_ranks: int
) -> PreparedLabels:
    """Check labels int64 [B] of ``num_classes``; this rank has ``num_local`` classes from ``first`` on."""
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
    """Return the position of row numbers int64 [B] among the first ``count`` of ascending ``numbers_A``; −1: absent."""
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
    """Return ``SamplingCorrection.log2_weight`` (0-dim, float32) for labels on a device, which may repeat."""
    from geartrain.bridge.kernels.triton import sample_terms as kernels

    out = torch.empty((), dtype=torch.float32, device=labels_B.device)
    numbers = len(labels_B), num_active, num_live_classes
    cost = Cost(16.0 * len(labels_B))
    launch(kernels.sampled_weight, (1,), labels_B.sort().values, out, *numbers, BLOCK=1024, num_warps=8, cost=cost)
    return out


def prepare_features(
    features_BD: Tensor, counts_B: Tensor | None, *, unit: bool, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return features, their inverse lengths and ``factor`` · features as ``dtype``.

    Features are float32 [B, D], of unit length with ``unit``; inverse lengths [B], else None. Features of samples that
    do not count become 0.
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
    """Return (``head.own_rows()`` float32 [B, D], their products with the features [B])."""
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
    """Return float64 [2, B] to sum over ranks: Σ exp2(logit − shift), and cosines.

    Sums are rescaled from ``shift_B`` to ``top_B``; None: all ranks have one shift.
    """
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
    """Results of :func:`losses`; all float32 [B]."""

    losses_B: Tensor
    lse2_B: Tensor
    target_weight_B: Tensor
    """dloss/dcos of the target, over the scale."""
    coefficients_B: Tensor
    """Factor that turns a sum of exp2(logit − this rank's shift) into one of probabilities."""


def losses(
    cos_B: Tensor,
    sum_B: Tensor,
    joint_B: Tensor | None,
    shift_B: Tensor | None,
    middle: float,
    counts_B: Tensor | None,
    margin: TargetAngle | None,
) -> Losses:
    """Return cross entropy from ``sum_B`` = Σ exp2(logit − ``joint_B``) over the other classes of all ranks.

    Args:
        cos_B: Cosines of the targets; without a margin their logits.
        sum_B: float32 or float64; all else is float32.
        joint_B: Shift of ``sum_B``; None: ``middle``.
        shift_B: This rank's own shift; None: ``middle``.
        middle: Constant shift where there are none by sample.
        counts_B: Factors of the losses; None: 1.
        margin: None: no margin.
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
    """Return the sum [B, D] of P parts times ``scale``, written in place of the first part.

    ``own`` (rows of the own classes [B, D], losses): the parts are Σ exp2(logit − shift) · ŵ of the other classes and
    become Σ p · ŵ of all. ``inverse_B``: gradients by unit features become gradients by features. The result is 0 for
    samples that do not count.
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
    """Return the factor and weights of the rows' gradients, as ``Batch.row_factors`` does, and their checksum; float32.

    The factor is 0-dim, the weights [B] are at most 1 (None: all 1), and the checksum is finite only if both are.

    ``upstream``, times ``scale``, is the derivative by the mean loss (0-dim), by each sample's loss [B], or by the mean
    of each rank [R], whose samples end at ``ends_R``. Derivatives by means are divided by ``num_counted``, or by 1.
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
