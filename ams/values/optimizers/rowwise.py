"""Adagrad and Adam with one number a row for the size of its gradients: nearly no memory beside wide rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from geartrain.ams.values.optimizers.adagrad import Adagrad
from geartrain.ams.values.optimizers.adam import power
from geartrain.ams.values.optimizers.adamw import AdamW
from geartrain.ams.values.optimizers.spec import Floats, Slot, UpdateStep

_LANES = 16
"""Sums side by side in :func:`mean_square`, as many as the widest instruction set has."""


@dataclass(frozen=True)
class RowWiseAdagrad(Adagrad):
    """s ← s + mean(d²);  w ← w − lr / (1 + (t − 1) · lr_decay) · d / (√s + eps), with d = g + weight_decay · w.

    The mean is over the row, so that s is one number: ``rowwise_adagrad`` of FBGEMM (with its weight decay of mode L2)
    and ``torchrec.optim.RowWiseAdagrad``. s begins at ``initial_accumulator_value``, and t is the row's own number of
    updates. A row of width 1 is updated as by :class:`Adagrad`. Memory: 4 bytes per row, and 8 with ``lr_decay``. A
    push that carries a sum of a row's squares beyond the range of float32 is refused like any other overflow.
    """

    name: ClassVar[str] = "rowwise_adagrad"
    slots: ClassVar[tuple[Slot, ...]] = (Slot("sum of mean squares", is_non_negative=True, per_row=True),)
    state: ClassVar[str] = "sum of mean squares"

    def updated(self, row: Floats, slots: Floats, gradient: Floats, push: UpdateStep) -> tuple[Floats, Floats]:
        dtype = push.dtype
        w = row.astype(dtype)
        step_size = dtype(float(dtype(push.lr)) / (1 + (push.t - 1) * self.lr_decay))
        direction = gradient.astype(dtype) * dtype(push.scale) + dtype(self.weight_decay) * w
        total = slots.astype(dtype) + mean_square(direction)
        root = np.sqrt(dtype(self.initial_accumulator_value) + total)
        return w - step_size * (direction * (dtype(1) / (root + dtype(self.eps)))), total


@dataclass(frozen=True)
class RowWiseAdam(AdamW):
    """m ← β₁ m + (1 − β₁) g;  v ← β₂ v + (1 − β₂) mean(g²);  w ← (1 − lr · weight_decay) · w − lr · m̂ / (√v̂ + eps).

    The mean is over the row, so that v is one number: ``partial_rowwise_adam`` of FBGEMM. m̂ = m / (1 − β₁ᵗ) and v̂ =
    v / (1 − β₂ᵗ), where t is the row's own number of updates (FBGEMM's is the table's). A row of width 1 is updated as
    by :class:`AdamW`. Memory: one slot of float32 and 12 bytes per row. Range as with :class:`RowWiseAdagrad`.
    """

    weight_decay: float = 0.0
    """Part of a row that an update with a learning rate of 1 takes away, apart from the gradient."""

    name: ClassVar[str] = "rowwise_adam"
    slots: ClassVar[tuple[Slot, ...]] = (
        Slot("first moment"),
        Slot("second moment", is_non_negative=True, per_row=True),
    )

    def updated(self, row: Floats, slots: Floats, gradient: Floats, push: UpdateStep) -> tuple[Floats, Floats]:
        dim, dtype = row.shape[-1], push.dtype
        w, m, v = row.astype(dtype), slots[..., :dim].astype(dtype), slots[..., dim:].astype(dtype)
        beta1, beta2 = self.betas
        step_size = dtype(float(dtype(push.lr)) / (1 - power(beta1, push.t)))
        inverse_root = dtype(1 / math.sqrt(1 - power(beta2, push.t)))
        kept = dtype(1 - float(dtype(push.lr)) * self.weight_decay)
        direction = gradient.astype(dtype) * dtype(push.scale)
        m = dtype(beta1) * m + dtype(1 - beta1) * direction
        v = dtype(beta2) * v + dtype(1 - beta2) * mean_square(direction)
        inverse = dtype(1) / (np.sqrt(v) * inverse_root + dtype(self.eps))
        return w * kept - step_size * (m * inverse), np.concatenate([m, v], axis=-1)


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
