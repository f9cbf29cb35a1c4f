"""Mean over the ranks, for losses whose gradients DDP, FSDP2 or synchronous pushes average over the ranks.

Legend: R ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from geartrain.bridge.collectives.communicator import Communicator


class _MeanOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_sum: Tensor, amount: Tensor | None, link: Communicator) -> Tensor:
        # Always float64, since a rank without samples does not know the dtype of the others' losses.
        own = own_sum.detach().double()
        amounts = torch.zeros_like(own) if amount is None else amount.to(own)
        total, divisor = link.sum(torch.stack([own, amounts])).unbind()
        ctx.factor = link.world_size if amount is None else (link.world_size / divisor).to(own_sum.dtype)
        return (total if amount is None else total / divisor).to(own_sum.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        return upstream * ctx.factor, None, None


def mean_of_ranks(own_sum: Tensor, amount: Tensor | None, link: Communicator) -> Tensor:
    """Return Σ ``own_sum`` / Σ ``amount`` over the ranks (None: 1), the same on each: one all-reduce of two numbers.

    Backward gives R times the derivative, as gradients of replicated parts are averaged over the R ranks.
    """
    mean: Tensor = _MeanOfRanks.apply(own_sum, amount, link)  # type: ignore[no-untyped-call]
    return mean
