"""SparseMomentum(untouched="elapsed") in plain numpy: what the compiled table computes, bit by bit where no row is old
enough for its sweep (``RowTable(window=...)``), which rounds once more.

A step of learning rate η without a gradient is linear, v' = μ v + λ w and w' = w − η v', so what several steps do to a
row is one matrix of 2 x 2: the product of theirs, from the latest back, in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.optimizers.spec import Drift
from geartrain.ams.values.specs import DTYPES, Ids
from tests.specification.ops import Floats
from tests.specification.optimizers import UpdateStep, updated
from tests.specification.row_table import ReferenceTable

Matrix = tuple[float, float, float, float]
"""Row by row: w' = m[0] w + m[1] v, v' = m[2] w + m[3] v."""
_LARGEST = {"float32": (2 - 2**-23) * 2.0**127, "float16": 65504.0, "bfloat16": (2 - 2**-7) * 2.0**127}
_RESTING = -1


def then(first: Matrix, second: Matrix) -> Matrix:
    """Return the matrix of ``first`` and then ``second``; factors end at 1e250."""
    a, b = first, second
    product = (
        b[0] * a[0] + b[1] * a[2],
        b[0] * a[1] + b[1] * a[3],
        b[2] * a[0] + b[3] * a[2],
        b[2] * a[1] + b[3] * a[3],
    )
    ww, wv, vw, vv = (min(max(factor, -1e250), 1e250) for factor in product)
    return ww, wv, vw, vv


@dataclass
class ElapsedTable(ReferenceTable):
    """A table whose untouched rows move, as a dict. Exact."""

    lrs: list[float] = field(default_factory=list)
    """Of all steps that have ended."""
    last: dict[int, int] = field(default_factory=dict)
    """By id, the step that the row is kept as of: 0 as the table began, -1 if nothing moves it."""
    origin: Matrix = (1.0, 0.0, 0.0, 1.0)

    @property
    def drift(self) -> Drift:
        """How rows move at rest."""
        assert self.optimizer.drift is not None
        return self.optimizer.drift

    def step(self, lr: float) -> Matrix:
        """What one step without a gradient does."""
        momentum, decay = (float(np.float32(x)) for x in self.drift)
        rate = float(np.float32(lr))
        return 1.0 - rate * decay, -(rate * momentum), decay, momentum

    def caught_up(self, row_id: int) -> tuple[Floats, Floats]:
        """Row and slot [D] as float32, before they are rounded to their storage types."""
        row = super().row(row_id).astype(np.float32)
        slot = self.slots_of(row_id).astype(np.float32)
        last = self.last.get(row_id, 0)
        if last == _RESTING or last >= len(self.lrs) or (last == 0 and not self.drift.weight_decay):
            return row, slot
        matrix = self.origin
        if last > 0:
            matrix = (1.0, 0.0, 0.0, 1.0)
            for lr in self.lrs[: last - 1 : -1]:
                matrix = then(self.step(lr), matrix)
        return (
            _combined(matrix[0], row, matrix[1] if last else 0.0, slot, self.dtype),
            _combined(matrix[2], row, matrix[3] if last else 0.0, slot, self.slot_dtype),
        )

    def row(self, row_id: int) -> npt.NDArray[Any]:
        """The row [D] as it is now."""
        return self.caught_up(row_id)[0].astype(DTYPES[self.dtype])

    def push(
        self, ids: Ids, gradients: npt.NDArray[Any], lr: float, scale: float = 1.0, *, ends_step: bool = True
    ) -> int:
        """Update the rows of distinct ids; a row that had a gradient in this step already has one more."""
        before = len(self.rows)
        now = len(self.lrs)
        for row_id, gradient in zip(ids.tolist(), gradients, strict=True):
            row, slot = self.caught_up(row_id)
            late = self.last.get(row_id, 0) > now
            if late:
                direction = gradient.astype(np.float32) * np.float32(scale)
                row, slot = row - np.float32(lr) * direction, slot + direction
            else:
                row, slot = updated(self.optimizer, row, slot, gradient, UpdateStep(lr, scale))
            self.store(row_id, row, slot, now + 1, late=late)
            self.last[row_id] = now + 1
        if ends_step:
            self.lrs.append(lr)
            self.origin = then(self.origin, self.step(lr))
        return len(self.rows) - before

    def assign(self, ids: Ids, rows: npt.NDArray[Any]) -> int:
        """Overwrite rows and forget their slots."""
        created = super().assign(ids, rows)
        for row_id in ids.tolist():
            self.last[row_id] = len(self.lrs) if self.drift.weight_decay else _RESTING
        return created


def _combined(a: float, x: Floats, b: float, y: Floats, dtype: str) -> Floats:
    value = a * x.astype(np.float64) + b * y.astype(np.float64)
    return np.clip(value, -_LARGEST[dtype], _LARGEST[dtype]).astype(np.float32)
