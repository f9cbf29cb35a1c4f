"""Adam, each row by its own number of updates."""

from __future__ import annotations

import torch

from geartrain.ams.values.optimizers.adam import Adam
from geartrain.bridge.head.backends.ranks.optimizers.step import RowStep


def adam(optimizer: Adam, step: RowStep) -> None:
    """See :class:`Adam`."""
    adam_moments(optimizer.betas, optimizer.eps, step.decay_gradient(optimizer.weight_decay), step)


def adam_moments(betas: tuple[float, float], eps: float, gradient_ND: torch.Tensor, step: RowStep) -> None:
    """Move the moments by ``gradient_ND``, and the rows by them."""
    beta1, beta2 = betas
    first_ND, second_ND = step.slots.chunk(2, dim=1)
    first_ND.mul_(beta1).add_(gradient_ND, alpha=1 - beta1)
    second_ND.mul_(beta2).addcmul_(gradient_ND, gradient_ND, value=1 - beta2)
    dtype = step.rows_ND.dtype
    step_size = (step.lr / (1 - beta1**step.t)).to(dtype)
    inverse_root = (1 - beta2**step.t).rsqrt().to(dtype)
    divisor_ND = torch.sqrt(second_ND, out=gradient_ND).mul_(inverse_root).add_(eps)
    step.rows_ND.sub_(torch.div(first_ND, divisor_ND, out=gradient_ND).mul_(step_size))
