"""Adam whose decay of the weights is apart from the gradient."""

from __future__ import annotations

from geartrain.ams.values.optimizers.adamw import AdamW
from geartrain.bridge.head.backends.ranks.optimizers.adam import adam_moments
from geartrain.bridge.head.backends.ranks.optimizers.step import RowStep


def adamw(optimizer: AdamW, step: RowStep) -> None:
    """See :class:`AdamW`."""
    step.rows_ND.mul_(1 - step.lr * optimizer.weight_decay)
    adam_moments(optimizer.betas, optimizer.eps, step.gradient_ND, step)
