"""Adagrad and Adam with one number a row for the size of its gradients.

What is one number a row, like the step's t, is [N, 1] here.
"""

from __future__ import annotations

import torch

from geartrain.ams.values.optimizers.rowwise import RowWiseAdagrad, RowWiseAdam
from geartrain.bridge.head.backends.ranks.optimizers.step import RowStep


def rowwise_adagrad(optimizer: RowWiseAdagrad, step: RowStep) -> None:
    """See :class:`RowWiseAdagrad`."""
    gradient_ND, total_N = step.decay_gradient(optimizer.weight_decay), step.slots
    total_N.add_(_mean_square(gradient_ND))
    rate_N = torch.sqrt(total_N + optimizer.initial_accumulator_value).add_(optimizer.eps).reciprocal_()
    if optimizer.counts_updates:
        rate_N.mul_((1 / (1 + (step.t - 1) * optimizer.lr_decay)).to(rate_N.dtype))
    step.rows_ND.add_(gradient_ND.mul_(rate_N), alpha=-step.lr)


def rowwise_adam(optimizer: RowWiseAdam, step: RowStep) -> None:
    """See :class:`RowWiseAdam`."""
    (beta1, beta2), gradient_ND = optimizer.betas, step.gradient_ND
    dim, dtype = gradient_ND.shape[1], gradient_ND.dtype
    first_ND, second_N = step.slots[:, :dim], step.slots[:, dim:]
    first_ND.mul_(beta1).add_(gradient_ND, alpha=1 - beta1)
    second_N.mul_(beta2).add_(_mean_square(gradient_ND), alpha=1 - beta2)
    inverse_root = (1 - beta2**step.t).rsqrt().to(dtype)
    rate_N = torch.sqrt(second_N).mul_(inverse_root).add_(optimizer.eps).reciprocal_()
    step_size = (step.lr / (1 - beta1**step.t)).to(dtype)
    step.rows_ND.mul_(1 - step.lr * optimizer.weight_decay)
    step.rows_ND.sub_(torch.mul(first_ND, rate_N, out=gradient_ND).mul_(step_size))


def _mean_square(gradient_ND: torch.Tensor) -> torch.Tensor:
    """[N, 1]."""
    norm_N: torch.Tensor = torch.linalg.vector_norm(gradient_ND, dim=1, keepdim=True)
    return norm_N.square_().div_(gradient_ND.shape[1])
