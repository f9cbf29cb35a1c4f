"""Projection solved in closed form: linear discriminants (Fisher 1936; Rao 1948) of a backbone's descriptors.

This linear map separates the classes before training begins, which saves thousands of training steps.

Legend: N images, C classes, P width of a descriptor, D width of a feature.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from geartrain.workers.models.backbones import StrokeNet

RIDGE = 0.1
"""Share of the mean within-class variance that is added to every variance, for directions with too few samples."""
SUMS_BYTES = 1 << 30


@torch.no_grad()
def fit_projection(backbone: StrokeNet, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> None:
    """Set ``backbone.projection`` to the D directions with the most variance between classes relative to within them.

    ``batches`` yields (bitmaps [N, K, S, S], labels [N]). Each direction is scaled to unit variance within classes and
    shrunk by λ/(λ + 1), λ its ratio of variances: uninformative directions vanish. Features are centred, of mean length
    4·sqrt(D). Classes whose sums do not fit 1 GiB are left out of the fit.
    """
    dim, width = backbone.projection.weight.shape
    counted = min(num_classes, max(2, SUMS_BYTES // (4 * width)))
    sums_CP, count_C, second_PP = _moments(backbone, batches, counted, width)
    weight_PD, mean_P = _discriminants(sums_CP.double(), count_C.double(), second_PP, dim)
    means_CP = sums_CP[count_C > 0].double() / count_C[count_C > 0, None]
    length = torch.linalg.vector_norm((means_CP - mean_P) @ weight_PD, dim=1).mean().clamp_min(1e-12)
    weight_PD *= 4 * math.sqrt(dim) / length
    backbone.projection.weight.copy_(weight_PD.T)
    backbone.projection.bias.copy_(-(mean_P @ weight_PD))


def _moments(
    backbone: StrokeNet, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return sums [C, P] and counts [C] of the classes' descriptors, and their second moment [P, P], on the host."""
    sums_CP = torch.zeros(num_classes, width)
    count_C = torch.zeros(num_classes)
    second_PP = torch.zeros(width, width, dtype=torch.float64)
    for bitmaps, labels in batches:
        inside = labels < num_classes
        rows_NP = backbone.descriptors(bitmaps).float().cpu()[inside]
        sums_CP.index_add_(0, labels[inside], rows_NP)
        count_C.index_add_(0, labels[inside], torch.ones(len(rows_NP)))
        second_PP += rows_NP.T @ rows_NP
    return sums_CP, count_C, second_PP


def _discriminants(sums_CP: Tensor, count_C: Tensor, second_PP: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return directions [P, D] and the mean [P] to subtract first, float64."""
    seen = count_C > 0
    means_CP = sums_CP[seen] / count_C[seen, None]
    total = count_C.sum()
    within_PP = (second_PP - means_CP.T @ (means_CP * count_C[seen, None])) / total
    mean_P = means_CP.mean(0)
    centred_CP = means_CP - mean_P
    between_PP = centred_CP.T @ centred_CP / len(means_CP)
    # One image a class leaves no variance within: a little of that between replaces it.
    ridge = RIDGE * within_PP.diagonal().mean() + 1e-3 * between_PP.diagonal().mean() + 1e-12
    within_PP.diagonal().add_(ridge)
    if 2 * len(means_CP) <= len(within_PP):
        weight_PD = _of_few_classes(centred_CP, within_PP, dim)
        if weight_PD is not None:
            return weight_PD, mean_P
    variance, axes_PP = torch.linalg.eigh(within_PP)
    whitening_PP = axes_PP / variance.clamp_min(1e-12).sqrt()
    ratio, directions_PP = torch.linalg.eigh(whitening_PP.T @ between_PP @ whitening_PP)
    kept = min(dim, len(ratio))
    ratio = ratio[-kept:].clamp_min(0)
    weight_PD = torch.zeros(len(within_PP), dim, dtype=torch.float64)
    weight_PD[:, :kept] = whitening_PP @ directions_PP[:, -kept:] * (ratio / (ratio + 1))
    return weight_PD, mean_P


def _of_few_classes(centred_CP: Tensor, within_PP: Tensor, dim: int) -> Tensor | None:
    """Return the same directions [P, D], up to sign, from a Cholesky factor and a matrix [C, C] that spans the means.

    Costs P³ / 3 + 2·C·P² operations, where two eigenproblems of P × P cost some 20·P³. None if rounding has left no
    positive variance in some direction.
    """
    factor_PP, failed = torch.linalg.cholesky_ex(within_PP)
    if int(failed):
        return None
    white_PC = torch.linalg.solve_triangular(factor_PP, centred_CP.T, upper=False) / math.sqrt(len(centred_CP))
    ratio, axes_CC = torch.linalg.eigh(white_PC.T @ white_PC)
    kept = min(dim, len(ratio))
    ratio, axes_CK = ratio[-kept:].clamp_min(0), axes_CC[:, -kept:]
    # A direction is white_PC @ axis, of length sqrt(ratio); its weight is ratio / (ratio + 1).
    directions_PK = torch.linalg.solve_triangular(factor_PP.T, white_PC @ axes_CK, upper=True)
    weight_PD = torch.zeros(len(within_PP), dim, dtype=torch.float64)
    weight_PD[:, :kept] = directions_PK * (ratio.sqrt() / (ratio + 1))
    return weight_PD
