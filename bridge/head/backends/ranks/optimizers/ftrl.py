"""FTRL-Proximal: learning rates per number, and weights that are exactly zero."""

from __future__ import annotations

import torch

from geartrain.ams.values.optimizers.ftrl import FTRL, SMALLEST_RATE
from geartrain.bridge.head.backends.ranks.optimizers.step import RowStep


def ftrl(optimizer: FTRL, step: RowStep) -> None:
    """See :class:`FTRL`."""
    held_ND, n_ND = step.slots.chunk(2, dim=1)
    n_ND.addcmul_(step.gradient_ND, step.gradient_ND)
    root_ND = torch.sqrt(n_ND).add_(optimizer.beta)
    rate_ND = step.lr / root_ND
    pull_ND = step.gradient_ND.add_(held_ND)
    target_ND = step.rows_ND - rate_ND * pull_ND
    # Of the weights that become 0, before they do. A rate of 0 makes none so but those that are.
    held_ND.copy_(pull_ND.sub_(root_ND.mul_(step.rows_ND).div_(max(step.lr, SMALLEST_RATE))))
    held_ND.clamp_(-optimizer.l1, optimizer.l1)
    size_ND = target_ND.abs().sub_(optimizer.l1 * rate_ND)
    weight_ND = torch.copysign(size_ND / (1 + optimizer.l2 * rate_ND), target_ND)
    is_zero_ND = size_ND <= 0
    balance_ND = torch.sign(target_ND).mul_(-optimizer.l1).sub_(weight_ND, alpha=optimizer.l2)
    held_ND.copy_(torch.where(is_zero_ND, held_ND, balance_ND))
    step.rows_ND.copy_(weight_ND.masked_fill_(is_zero_ND, 0))
