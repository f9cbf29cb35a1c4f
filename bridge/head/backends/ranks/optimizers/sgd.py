"""Plain gradient descent."""

from __future__ import annotations

from geartrain.ams.values.optimizers.sgd import SGD
from geartrain.bridge.head.backends.ranks.optimizers.step import RowStep


def sgd(optimizer: SGD, step: RowStep) -> None:
    """See :class:`SGD`."""
    step.rows_ND.add_(step.decay_gradient(optimizer.weight_decay), alpha=-step.lr)
