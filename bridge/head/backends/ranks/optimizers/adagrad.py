"""Adagrad, each row by its own number of updates."""

from __future__ import annotations

import torch

from geartrain.ams.values.optimizers.adagrad import Adagrad
from geartrain.bridge.head.backends.ranks.optimizers.step import RowStep


def adagrad(optimizer: Adagrad, step: RowStep) -> None:
    """See :class:`Adagrad`."""
    gradient_ND, total_ND = step.decay_gradient(optimizer.weight_decay), step.slots
    total_ND.addcmul_(gradient_ND, gradient_ND)
    root_ND = torch.sqrt(total_ND + optimizer.initial_accumulator_value).add_(optimizer.eps)
    change_ND = gradient_ND.div_(root_ND)
    if optimizer.counts_updates:
        change_ND.mul_((1 / (1 + (step.t - 1) * optimizer.lr_decay)).to(change_ND.dtype))
    step.rows_ND.add_(change_ND, alpha=-step.lr)
