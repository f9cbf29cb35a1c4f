"""Momentum, of rows that all have a gradient or of some."""

from __future__ import annotations

from geartrain.ams.values.optimizers.momentum import Momentum
from geartrain.ams.values.optimizers.sparse_momentum import SparseMomentum
from geartrain.bridge.head.backends.ranks.optimizers.step import RowStep


def momentum(optimizer: Momentum, step: RowStep) -> None:
    """See :class:`Momentum`."""
    velocity_ND, gradient_ND = step.slots, step.decay_gradient(optimizer.weight_decay)
    velocity_ND.mul_(optimizer.momentum).add_(gradient_ND)
    change_ND = gradient_ND.add_(velocity_ND, alpha=optimizer.momentum) if optimizer.nesterov else velocity_ND
    step.rows_ND.add_(change_ND, alpha=-step.lr)


def sparse_momentum(optimizer: SparseMomentum, step: RowStep) -> None:
    """See :class:`SparseMomentum`; where untouched rows move, ``elapsed_momentum.py`` updates them."""
    momentum(Momentum(optimizer.lr, optimizer.momentum, optimizer.weight_decay), step)
