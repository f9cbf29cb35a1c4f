"""One loss over the samples of all ranks, made of what each rank has of it.

Legend: R ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from geartrain.bridge.collectives.link import RankLink


class _MeanOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_sum: Tensor, amount: Tensor | None, link: RankLink) -> Tensor:
        amounts = own_sum.new_zeros(()) if amount is None else amount.to(own_sum)
        total, divisor = link.sum(torch.stack([own_sum.detach(), amounts])).unbind()
        ctx.factor = link.world_size if amount is None else link.world_size / divisor
        return total.clone() if amount is None else total / divisor

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        return upstream * ctx.factor, None, None


def mean_of_ranks(own_sum: Tensor, amount: Tensor | None, link: RankLink) -> Tensor:
    """Σ ``own_sum`` / Σ ``amount`` over the ranks (None: 1), the same number on each: one all-reduce of two numbers.

    Backward gives R times the derivative, for the gradients of replicated parts are averaged over the R ranks.
    """
    mean: Tensor = _MeanOfRanks.apply(own_sum, amount, link)  # type: ignore[no-untyped-call]
    return mean
