"""The optimizers of rows on ranks in tensor operations, on any device, in the dtype of the operands.

Legend: N rows of a call, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from geartrain.ams.values.specs import Adam, Momentum, RowOptimizerSpec, SparseMomentum
from geartrain.bridge.head.backends.ranks.elapsed_momentum import RankSteps


def plain_step(
    optimizer: RowOptimizerSpec,
    rows_ND: Tensor,
    slots_ND: Tensor | None,
    gradient_ND: Tensor,
    lr: float,
    updates_N: Tensor | None,
) -> None:
    """Update rows and slots in place; ``ams/kernels/reference/ops.py``."""
    if optimizer.weight_decay:
        gradient_ND.add_(rows_ND, alpha=optimizer.weight_decay)
    if slots_ND is None:
        rows_ND.add_(gradient_ND, alpha=-lr)
    elif isinstance(optimizer, Adam):
        assert updates_N is not None
        _adam_step(optimizer, rows_ND, slots_ND, gradient_ND, lr, updates_N)
    elif isinstance(optimizer, Momentum | SparseMomentum):
        slots_ND.mul_(optimizer.momentum).add_(gradient_ND)
        is_nesterov = isinstance(optimizer, Momentum) and optimizer.nesterov
        step_ND = gradient_ND.add_(slots_ND, alpha=optimizer.momentum) if is_nesterov else slots_ND
        rows_ND.add_(step_ND, alpha=-lr)


def elapsed_step(
    optimizer: SparseMomentum,
    steps: RankSteps,
    rows_ND: Tensor,
    slots_ND: Tensor,
    last_N: Tensor,
    gradient_ND: Tensor,
    lr: float,
) -> None:
    """Catch up rows of these last steps and update them in place; ``ams/kernels/reference/elapsed_momentum.py``."""
    moved_ND, moved_slots_ND = steps.moved(rows_ND, slots_ND, last_N)
    rows_ND.copy_(moved_ND)
    slots_ND.copy_(moved_slots_ND)
    is_late = steps.are_late(last_N).unsqueeze(1)  # [N, 1]: a second gradient of the row's step
    gradient_ND.add_(torch.where(is_late, 0.0, rows_ND), alpha=optimizer.weight_decay)
    slots_ND.copy_(torch.where(is_late, slots_ND, slots_ND * optimizer.momentum)).add_(gradient_ND)
    rows_ND.add_(torch.where(is_late, gradient_ND, slots_ND), alpha=-lr)


def _adam_step(
    optimizer: Adam, rows_ND: Tensor, slots_ND: Tensor, gradient_ND: Tensor, lr: float, updates_N: Tensor
) -> None:
    """Update rows and moments [N, 2 D] in place as update number ``updates_N``; ``ams/kernels/reference/adam.py``."""
    beta1, beta2 = optimizer.betas
    first_ND, second_ND = slots_ND.chunk(2, dim=1)
    first_ND.mul_(beta1).add_(gradient_ND, alpha=1 - beta1)
    second_ND.mul_(beta2).addcmul_(gradient_ND, gradient_ND, value=1 - beta2)
    t_N = updates_N.double()
    step_N = (lr / (1 - beta1**t_N)).to(rows_ND.dtype)
    inverse_root_N = (1 - beta2**t_N).rsqrt().to(rows_ND.dtype)
    divisor_ND = torch.sqrt(second_ND, out=gradient_ND).mul_(inverse_root_N.unsqueeze(1)).add_(optimizer.eps)
    rows_ND.sub_(torch.div(first_ND, divisor_ND, out=gradient_ND).mul_(step_N.unsqueeze(1)))
