"""Optimizers of rows on devices: in tensor operations, in the operands' dtype; and as numbers for kernels.

Each computes what its specification in ``ams/values/optimizers`` says. Legend: N rows of a call, D width, S numbers of
a row's slots. A value that is one number for each row, such as the step's t, is [N, 1].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from geartrain.ams.values.optimizers.adagrad import Adagrad, RowWiseAdagrad
from geartrain.ams.values.optimizers.adam import Adam, AdamW, RowWiseAdam
from geartrain.ams.values.optimizers.ftrl import FTRL, SMALLEST_RATE
from geartrain.ams.values.optimizers.momentum import SGD, Momentum, SparseMomentum
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.optimizers.rmsprop import RMSProp


@dataclass(frozen=True)
class RowStep:
    """Operands of one update of distinct rows. Rows and slots change in place; the gradient may be overwritten."""

    rows_ND: Tensor
    slots_ND: Tensor | None
    """[N, S], one slot after another; None: the optimizer has none."""
    gradient_ND: Tensor
    lr: float
    updates_N: Tensor | None
    """Number of each row's update, from 1; None: not counted."""

    @property
    def slots(self) -> Tensor:
        """The slots [N, S], which must exist."""
        assert self.slots_ND is not None
        return self.slots_ND

    @property
    def t(self) -> Tensor:
        """Number of each row's update, float64 [N, 1]."""
        assert self.updates_N is not None
        return self.updates_N.double().unsqueeze(1)

    def decay_gradient(self, weight_decay: float) -> Tensor:
        """Add ``weight_decay`` · rows to the gradient in place, and return it."""
        return self.gradient_ND.add_(self.rows_ND, alpha=weight_decay) if weight_decay else self.gradient_ND


def sgd(optimizer: SGD, step: RowStep) -> None:
    step.rows_ND.add_(step.decay_gradient(optimizer.weight_decay), alpha=-step.lr)


def momentum(optimizer: Momentum, step: RowStep) -> None:
    velocity_ND, gradient_ND = step.slots, step.decay_gradient(optimizer.weight_decay)
    velocity_ND.mul_(optimizer.momentum).add_(gradient_ND)
    change_ND = gradient_ND.add_(velocity_ND, alpha=optimizer.momentum) if optimizer.nesterov else velocity_ND
    step.rows_ND.add_(change_ND, alpha=-step.lr)


def sparse_momentum(optimizer: SparseMomentum, step: RowStep) -> None:
    """Update as :func:`momentum`; ``elapsed_momentum.py`` is used instead where untouched rows move, too."""
    momentum(Momentum(optimizer.lr, optimizer.momentum, optimizer.weight_decay), step)


def adam(optimizer: Adam, step: RowStep) -> None:
    adam_moments(optimizer.betas, optimizer.eps, step.decay_gradient(optimizer.weight_decay), step)


def adam_moments(betas: tuple[float, float], eps: float, gradient_ND: torch.Tensor, step: RowStep) -> None:
    """Update the moments by ``gradient_ND``, and the rows by the moments."""
    beta1, beta2 = betas
    first_ND, second_ND = step.slots.chunk(2, dim=1)
    first_ND.mul_(beta1).add_(gradient_ND, alpha=1 - beta1)
    second_ND.mul_(beta2).addcmul_(gradient_ND, gradient_ND, value=1 - beta2)
    dtype = step.rows_ND.dtype
    step_size = (step.lr / (1 - beta1**step.t)).to(dtype)
    inverse_root = (1 - beta2**step.t).rsqrt().to(dtype)
    divisor_ND = torch.sqrt(second_ND, out=gradient_ND).mul_(inverse_root).add_(eps)
    step.rows_ND.sub_(torch.div(first_ND, divisor_ND, out=gradient_ND).mul_(step_size))


def adamw(optimizer: AdamW, step: RowStep) -> None:
    step.rows_ND.mul_(1 - step.lr * optimizer.weight_decay)
    adam_moments(optimizer.betas, optimizer.eps, step.gradient_ND, step)


def adagrad(optimizer: Adagrad, step: RowStep) -> None:
    gradient_ND, total_ND = step.decay_gradient(optimizer.weight_decay), step.slots
    total_ND.addcmul_(gradient_ND, gradient_ND)
    root_ND = torch.sqrt(total_ND + optimizer.initial_accumulator_value).add_(optimizer.eps)
    change_ND = gradient_ND.div_(root_ND)
    if optimizer.counts_updates:
        change_ND.mul_((1 / (1 + (step.t - 1) * optimizer.lr_decay)).to(change_ND.dtype))
    step.rows_ND.add_(change_ND, alpha=-step.lr)


def rmsprop(optimizer: RMSProp, step: RowStep) -> None:
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


def ftrl(optimizer: FTRL, step: RowStep) -> None:
    held_ND, n_ND = step.slots.chunk(2, dim=1)
    n_ND.addcmul_(step.gradient_ND, step.gradient_ND)
    root_ND = torch.sqrt(n_ND).add_(optimizer.beta)
    rate_ND = step.lr / root_ND
    pull_ND = step.gradient_ND.add_(held_ND)
    target_ND = step.rows_ND - rate_ND * pull_ND
    # For weights that become 0, computed before they do. With a learning rate of 0 only weights at 0 stay at 0.
    held_ND.copy_(pull_ND.sub_(root_ND.mul_(step.rows_ND).div_(max(step.lr, SMALLEST_RATE))))
    held_ND.clamp_(-optimizer.l1, optimizer.l1)
    size_ND = target_ND.abs().sub_(optimizer.l1 * rate_ND)
    weight_ND = torch.copysign(size_ND / (1 + optimizer.l2 * rate_ND), target_ND)
    is_zero_ND = size_ND <= 0
    balance_ND = torch.sign(target_ND).mul_(-optimizer.l1).sub_(weight_ND, alpha=optimizer.l2)
    held_ND.copy_(torch.where(is_zero_ND, held_ND, balance_ND))
    step.rows_ND.copy_(weight_ND.masked_fill_(is_zero_ND, 0))


def rowwise_adagrad(optimizer: RowWiseAdagrad, step: RowStep) -> None:
    gradient_ND, total_N = step.decay_gradient(optimizer.weight_decay), step.slots
    total_N.add_(_mean_square(gradient_ND))
    rate_N = torch.sqrt(total_N + optimizer.initial_accumulator_value).add_(optimizer.eps).reciprocal_()
    if optimizer.counts_updates:
        rate_N.mul_((1 / (1 + (step.t - 1) * optimizer.lr_decay)).to(rate_N.dtype))
    step.rows_ND.add_(gradient_ND.mul_(rate_N), alpha=-step.lr)


def rowwise_adam(optimizer: RowWiseAdam, step: RowStep) -> None:
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
    """Return the mean of g² over each row, [N, 1]."""
    norm_N: torch.Tensor = torch.linalg.vector_norm(gradient_ND, dim=1, keepdim=True)
    return norm_N.square_().div_(gradient_ND.shape[1])


TENSOR_OPTIMIZERS: dict[str, Callable[[Any, RowStep], None]] = {
    "sgd": sgd,
    "momentum": momentum,
    "sparse_momentum": sparse_momentum,
    "adam": adam,
    "adagrad": adagrad,
    "adamw": adamw,
    "rowwise_adagrad": rowwise_adagrad,
    "rowwise_adam": rowwise_adam,
    "rmsprop": rmsprop,
    "ftrl": ftrl,
}


@dataclass(frozen=True)
class ExactStep:
    """Operands of one update of distinct rows, float32. Rows and slots change in place."""

    rows_ND: Tensor
    slots_ND: Tensor | None
    """[N, S]; None: the optimizer has none."""
    gradient_ND: Tensor
    """Gradient, already times the scale."""
    factors_NF: Tensor | None
    """Factors by each row's number of updates: see :func:`exact_factors`."""

    @property
    def slots(self) -> Tensor:
        """The slots [N, S], which must exist."""
        assert self.slots_ND is not None
        return self.slots_ND

    def decayed(self, weight_decay: float) -> Tensor:
        """Return gradient + ``weight_decay`` · rows."""
        return self.gradient_ND + weight_decay * self.rows_ND


def _exact_sgd(optimizer: SGD, step: ExactStep) -> None:
    step.rows_ND.sub_(step.decayed(optimizer.weight_decay) * optimizer.lr)


def _exact_momentum(optimizer: Momentum, step: ExactStep) -> None:
    direction_ND, slots_ND = step.decayed(optimizer.weight_decay), step.slots
    slots_ND.mul_(optimizer.momentum).add_(direction_ND)
    step_ND = direction_ND + optimizer.momentum * slots_ND if optimizer.nesterov else slots_ND
    step.rows_ND.sub_(step_ND * optimizer.lr)


def _exact_adagrad(optimizer: Adagrad, step: ExactStep) -> None:
    direction_ND, slots_ND = step.decayed(optimizer.weight_decay), step.slots
    slots_ND.add_(direction_ND * direction_ND)
    root_ND = _exact_root(slots_ND + optimizer.initial_accumulator_value).add_(optimizer.eps)
    step.rows_ND.sub_(direction_ND / root_ND * (optimizer.lr if step.factors_NF is None else step.factors_NF))


def _exact_adam(optimizer: Adam, step: ExactStep) -> None:
    _exact_moments(optimizer, step.decayed(optimizer.weight_decay), step)


def _exact_adamw(optimizer: AdamW, step: ExactStep) -> None:
    step.rows_ND.mul_(1 - float(np.float32(optimizer.lr)) * optimizer.weight_decay)
    _exact_moments(optimizer, step.decayed(0), step)


def _exact_moments(optimizer: Adam | AdamW, direction_ND: Tensor, step: ExactStep) -> None:
    (beta1, beta2), factors_NF = optimizer.betas, step.factors_NF
    assert factors_NF is not None
    first_ND, second_ND = step.slots.chunk(2, dim=1)
    first_ND.mul_(beta1).add_(direction_ND * (1 - beta1))
    second_ND.mul_(beta2).add_(direction_ND * (1 - beta2) * direction_ND)
    divisor_ND = _exact_root(second_ND).mul_(factors_NF[:, 1:]).add_(optimizer.eps)
    step.rows_ND.sub_(first_ND / divisor_ND * factors_NF[:, :1])


def _exact_root(values: Tensor) -> Tensor:
    """Return square roots computed in float64, then rounded: torch's float32 root on a CPU is up to one unit off."""
    return values.double().sqrt_().float()


EXACT_OPTIMIZERS: dict[str, Callable[[Any, ExactStep], None]] = {
    "sgd": _exact_sgd,
    "momentum": _exact_momentum,
    "adagrad": _exact_adagrad,
    "adam": _exact_adam,
    "adamw": _exact_adamw,
}
"""Steps with the bits of a shard: each operation is rounded on its own, in the shard's order."""


def exact_factors(optimizer: RowOptimizerSpec, updates_N: npt.NDArray[np.int64]) -> npt.NDArray[np.float32] | None:
    """Return the factors of an :class:`ExactStep` for each row's number of updates, from 1: float32 [N, F].

    Computed on the host, as in a shard. None: the optimizer has none.
    """
    lr = float(np.float32(optimizer.lr))
    if isinstance(optimizer, Adam | AdamW):
        rest1_N, rest2_N = (1 - _powers(beta, updates_N) for beta in optimizer.betas)
        return np.stack([lr / rest1_N, 1 / np.sqrt(rest2_N)], 1).astype(np.float32)
    if isinstance(optimizer, Adagrad) and optimizer.counts_updates:
        return (lr / (1 + (updates_N - 1) * optimizer.lr_decay)).astype(np.float32)[:, None]
    return None


def _powers(base: float, exponents_N: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return base^exponent by squaring: products alone, as in a shard, since pow() rounds differently by machine."""
    powers_N, left_N = np.ones(len(exponents_N)), exponents_N
    while left_N.any():
        powers_N = np.where(left_N & 1, powers_N * base, powers_N)
        left_N, base = left_N >> 1, base * base
    return powers_N


def update_rows(optimizer: RowOptimizerSpec, step: RowStep) -> None:
    """Make one update as ``optimizer.updated`` specifies it."""
    TENSOR_OPTIMIZERS[optimizer.name](optimizer, step)


class StepNumbers(NamedTuple):
    """Arguments of ``step`` in ``bridge/kernels/triton/row_step.py``; ``kind`` names a constant there."""

    kind: str
    decay: float
    a: float = 0.0
    b: float = 0.0
    eps: float = 0.0


def step_numbers(optimizer: RowOptimizerSpec) -> StepNumbers | None:
    """Return the optimizer's arguments for kernels; None: kernels do not support it."""
    made = _STEP_NUMBERS.get(optimizer.name)
    return None if made is None else made(optimizer)


def _momentum_numbers(optimizer: Momentum) -> StepNumbers:
    kind = "NESTEROV" if getattr(optimizer, "nesterov", False) else "MOMENTUM"
    return StepNumbers(kind, optimizer.weight_decay, optimizer.momentum)


def _adagrad_numbers(optimizer: Adagrad) -> StepNumbers:
    first = optimizer.initial_accumulator_value
    return StepNumbers(optimizer.name.upper(), optimizer.weight_decay, optimizer.lr_decay, first, optimizer.eps)


def _adam_numbers(optimizer: Adam | AdamW) -> StepNumbers:
    # Logarithms: 1 - beta loses no digits, and a power is a product.
    a, b = (math.log(beta) if beta else -1e30 for beta in optimizer.betas)
    return StepNumbers(optimizer.name.upper(), optimizer.weight_decay, a, b, optimizer.eps)


_STEP_NUMBERS: dict[str, Callable[[Any], StepNumbers]] = {
    "sgd": lambda optimizer: StepNumbers("SGD", optimizer.weight_decay),
    "momentum": _momentum_numbers,
    "sparse_momentum": _momentum_numbers,
    "adagrad": _adagrad_numbers,
    "rowwise_adagrad": _adagrad_numbers,
    "adam": _adam_numbers,
    "adamw": _adam_numbers,
    "rowwise_adam": _adam_numbers,
}
