"""Adam in plain numpy: what the compiled table computes, bit by bit in float32, and the truth in float64.

Algorithm 1 of Kingma and Ba (ICLR 2015) with the decay of the weights in the gradient, as ``torch.optim.Adam`` has it.
A row's slots are its first moments [D], then its second ones [D]; t is the row's own number of updates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels.reference.row_table import ReferenceTable
from geartrain.ams.values.specs import Adam, Ids


def power(base: float, exponent: int) -> float:
    """Return ``base`` to the ``exponent`` by squaring: products alone have the same bits on every machine. Exact."""
    result = 1.0
    while exponent > 0:
        if exponent & 1:
            result *= base
        exponent, base = exponent >> 1, base * base
    return result


def adam_update(
    optimizer: Adam,
    row: npt.NDArray[Any],
    slots: npt.NDArray[Any],
    t: int,
    gradient: npt.NDArray[Any],
    lr: float,
    scale: float,
    dtype: type[np.floating[Any]] = np.float32,
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the row [D] and slots [2 D] after update number ``t``, from 1: exact in float32, the truth in float64."""
    dim = row.shape[-1]
    w, m, v = row.astype(dtype), slots[..., :dim].astype(dtype), slots[..., dim:].astype(dtype)
    beta1, beta2 = optimizer.betas
    step_size = dtype(float(dtype(lr)) / (1 - power(beta1, t)))
    inverse_root = dtype(1 / math.sqrt(1 - power(beta2, t)))
    direction = gradient.astype(dtype) * dtype(scale) + dtype(optimizer.weight_decay) * w
    m = dtype(beta1) * m + dtype(1 - beta1) * direction
    v = dtype(beta2) * v + dtype(1 - beta2) * direction * direction
    w = w - step_size * (m / (np.sqrt(v) * inverse_root + dtype(optimizer.eps)))
    return w, np.concatenate([m, v], axis=-1)


@dataclass
class AdamTable(ReferenceTable):
    """A table with Adam, as a dict. Exact."""

    def push(self, ids: Ids, gradients: npt.NDArray[Any], lr: float, scale: float = 1.0) -> int:
        """Update the rows of distinct ids; return how many were created."""
        assert isinstance(self.optimizer, Adam)
        before = len(self.rows)
        for row_id, gradient in zip(ids.tolist(), gradients, strict=True):
            slots = self.slots.get(row_id, np.zeros(2 * self.dim, np.float32))
            self.updates[row_id] = t = self.updates.get(row_id, 0) + 1
            row, slots = adam_update(self.optimizer, self.row(row_id), slots, t, gradient, lr, scale)
            self.store(row_id, row, slots, t)
        return len(self.rows) - before

    def assign(self, ids: Ids, rows: npt.NDArray[Any]) -> int:
        """Overwrite rows and forget their moments and updates; return how many were created."""
        for row_id in ids.tolist():
            self.updates.pop(row_id, None)
        return super().assign(ids, rows)
