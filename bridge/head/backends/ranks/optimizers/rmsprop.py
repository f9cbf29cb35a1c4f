"""RMSProp: gradients by the root of their average square."""

from __future__ import annotations

import torch

from geartrain.ams.values.optimizers.rmsprop import RMSProp
from geartrain.bridge.head.backends.ranks.optimizers.step import RowStep


def rmsprop(optimizer: RMSProp, step: RowStep) -> None:
    """See :class:`RMSProp`."""
    gradient_ND = step.decay_gradient(optimizer.weight_decay)
    *others, square_ND = step.slots.chunk(len(optimizer.slots), dim=1)
    square_ND.mul_(optimizer.alpha).addcmul_(gradient_ND, gradient_ND, value=1 - optimizer.alpha)
    variance_ND = square_ND
    if optimizer.centered:
        mean_ND = others.pop().mul_(optimizer.alpha).add_(gradient_ND, alpha=1 - optimizer.alpha)
        variance_ND = square_ND.addcmul(mean_ND, mean_ND, value=-1).clamp_(min=0)
    change_ND = gradient_ND.div_(torch.sqrt(variance_ND).add_(optimizer.eps))
    if others:
        change_ND = others.pop().mul_(optimizer.momentum).add_(change_ND)
    step.rows_ND.add_(change_ND, alpha=-step.lr)
