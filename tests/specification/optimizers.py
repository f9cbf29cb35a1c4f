"""One update of a row by every optimizer, in plain numpy: compiled code has its bits in float32, float64 is the truth.

Legend: D width of a row, S numbers of its slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.optimizers.ftrl import SMALLEST_RATE
from geartrain.ams.values.optimizers.registry import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Momentum,
    RMSProp,
    RowOptimizerSpec,
    RowWiseAdagrad,
    RowWiseAdam,
    SparseMomentum,
)

Floats = npt.NDArray[Any]
Updated = tuple[Floats, Floats]
"""Row [..., D] and slots [..., S], one after the other, after one update."""

_LANES = 16
"""Sums side by side in :func:`mean_square`, as many as the widest instruction set has."""


class UpdateStep(NamedTuple):
    """What an update of a row depends on beside row, slots and gradient."""

    lr: float
    scale: float = 1.0
    """Multiplies the gradient."""
    t: int = 1
    """Number of the row's update, from 1."""
    dtype: type[np.floating[Any]] = np.float32
    """What it is computed in."""


def updated(optimizer: RowOptimizerSpec, row: Floats, slots: Floats, gradient: Floats, push: UpdateStep) -> Updated:
    """Return row [..., D] and slots [..., S] after one update by ``optimizer``, computed in ``push.dtype``."""
    dtype = push.dtype
    scaled = gradient.astype(dtype) * dtype(push.scale)
    return _FORMULAS[type(optimizer)](optimizer, row.astype(dtype), slots.astype(dtype), scaled, push)


def power(base: float, exponent: int) -> float:
    """Return ``base`` to the ``exponent`` by squaring: products alone have the same bits on every machine. Exact."""
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        exponent, base = exponent >> 1, base * base
    return result


def mean_square(values: Floats) -> Floats:
    """Return the mean of the squares of each row, [..., 1] of [..., D].

    In the order of compiled code: 16 sums side by side, folded in halves. Exact.
    """
    dim = values.shape[-1]
    padding = [(0, 0)] * (values.ndim - 1) + [(0, -dim % _LANES)]
    squares = np.pad(values * values, padding).reshape(*values.shape[:-1], -1, _LANES)
    sums: Floats = squares[..., 0, :]
    for line in range(1, squares.shape[-2]):
        sums = sums + squares[..., line, :]
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    dtype = values.dtype.type
    sums *= dtype(1) / dtype(dim)
    return sums


def _sgd(of: SGD, w: Floats, slots: Floats, g: Floats, push: UpdateStep) -> Updated:
    return w - push.dtype(push.lr) * (g + push.dtype(of.weight_decay) * w), slots


def _momentum(of: Momentum | SparseMomentum, w: Floats, velocity: Floats, g: Floats, push: UpdateStep) -> Updated:
    dtype = push.dtype
    momentum, direction = dtype(of.momentum), g + dtype(of.weight_decay) * w
    velocity = momentum * velocity + direction
    step = direction + momentum * velocity if getattr(of, "nesterov", False) else velocity
    return w - dtype(push.lr) * step, velocity


def _adam(of: Adam, w: Floats, slots: Floats, g: Floats, push: UpdateStep) -> Updated:
    return _adam_step(of, w, slots, g + push.dtype(of.weight_decay) * w, push)


def _adamw(of: AdamW, w: Floats, slots: Floats, g: Floats, push: UpdateStep) -> Updated:
    return _adam_step(of, w * push.dtype(1 - float(push.dtype(push.lr)) * of.weight_decay), slots, g, push)


def _adam_step(of: Adam, w: Floats, slots: Floats, direction: Floats, push: UpdateStep) -> Updated:
    dim, dtype = w.shape[-1], push.dtype
    m, v, (beta1, beta2) = slots[..., :dim], slots[..., dim:], of.betas
    step_size, inverse_root = _corrections(of, push)
    m = dtype(beta1) * m + dtype(1 - beta1) * direction
    v = dtype(beta2) * v + dtype(1 - beta2) * direction * direction
    return w - step_size * (m / (np.sqrt(v) * inverse_root + dtype(of.eps))), np.concatenate([m, v], axis=-1)


def _rowwise_adam(of: RowWiseAdam, w: Floats, slots: Floats, g: Floats, push: UpdateStep) -> Updated:
    dim, dtype = w.shape[-1], push.dtype
    m, v, (beta1, beta2) = slots[..., :dim], slots[..., dim:], of.betas
    step_size, inverse_root = _corrections(of, push)
    kept = dtype(1 - float(dtype(push.lr)) * of.weight_decay)
    m = dtype(beta1) * m + dtype(1 - beta1) * g
    v = dtype(beta2) * v + dtype(1 - beta2) * mean_square(g)
    inverse = dtype(1) / (np.sqrt(v) * inverse_root + dtype(of.eps))
    return w * kept - step_size * (m * inverse), np.concatenate([m, v], axis=-1)


def _corrections(of: Adam, push: UpdateStep) -> tuple[Any, Any]:
    """The size of a step of Adam, and what its root is multiplied with, by the number of the row's update."""
    beta1, beta2 = of.betas
    step_size = push.dtype(float(push.dtype(push.lr)) / (1 - power(beta1, push.t)))
    return step_size, push.dtype(1 / math.sqrt(1 - power(beta2, push.t)))


def _adagrad(of: Adagrad, w: Floats, total: Floats, g: Floats, push: UpdateStep) -> Updated:
    dtype = push.dtype
    direction = g + dtype(of.weight_decay) * w
    total = total + direction * direction
    root = np.sqrt(dtype(of.initial_accumulator_value) + total)
    return w - _falling_rate(of, push) * (direction / (root + dtype(of.eps))), total


def _rowwise_adagrad(of: RowWiseAdagrad, w: Floats, total: Floats, g: Floats, push: UpdateStep) -> Updated:
    dtype = push.dtype
    direction = g + dtype(of.weight_decay) * w
    total = total + mean_square(direction)
    root = np.sqrt(dtype(of.initial_accumulator_value) + total)
    return w - _falling_rate(of, push) * (direction * (dtype(1) / (root + dtype(of.eps)))), total


def _falling_rate(of: Adagrad, push: UpdateStep) -> Any:
    return push.dtype(float(push.dtype(push.lr)) / (1 + (push.t - 1) * of.lr_decay))


def _rmsprop(of: RMSProp, w: Floats, slots: Floats, g: Floats, push: UpdateStep) -> Updated:
    dtype = push.dtype
    state = np.split(slots, len(of.slots), axis=-1)
    alpha, rest = dtype(of.alpha), dtype(1 - of.alpha)
    direction = g + dtype(of.weight_decay) * w
    variance = state[-1] = alpha * state[-1] + rest * direction * direction
    if of.centered:
        state[-2] = alpha * state[-2] + rest * direction
        variance = np.maximum(variance - state[-2] * state[-2], dtype(0))
    step = direction / (np.sqrt(variance) + dtype(of.eps))
    if of.momentum:
        step = state[0] = dtype(of.momentum) * state[0] + step
    return w - dtype(push.lr) * step, np.concatenate(state, axis=-1)


def _ftrl(of: FTRL, w: Floats, slots: Floats, g: Floats, push: UpdateStep) -> Updated:
    dim, dtype = w.shape[-1], push.dtype
    held, n = slots[..., :dim], slots[..., dim:]
    lr, l1, l2 = dtype(push.lr), dtype(of.l1), dtype(of.l2)
    n = n + g * g
    root = dtype(of.beta) + np.sqrt(n)
    rate = lr / root
    pull = held + g
    target = w - rate * pull
    size = np.abs(target) - rate * l1
    is_zero = size <= 0
    weight = np.where(is_zero, dtype(0), np.copysign(size / (dtype(1) + rate * l2), target))
    with np.errstate(over="ignore"):  # it is cut off
        rest = pull - w * root * (dtype(1) / max(lr, dtype(SMALLEST_RATE)))
    rest = np.where(rest < -l1, -l1, rest)
    rest = np.where(l1 < rest, l1, rest)
    held = np.where(is_zero, rest, -(l2 * weight + np.copysign(l1, target)))
    return weight, np.concatenate([held, n], axis=-1)


_FORMULAS: dict[type[RowOptimizerSpec], Callable[..., Updated]] = {
    SGD: _sgd,
    Momentum: _momentum,
    SparseMomentum: _momentum,  # what steps without a gradient do is in elapsed_momentum.py
    Adam: _adam,
    AdamW: _adamw,
    Adagrad: _adagrad,
    RowWiseAdagrad: _rowwise_adagrad,
    RowWiseAdam: _rowwise_adam,
    RMSProp: _rmsprop,
    FTRL: _ftrl,
}
