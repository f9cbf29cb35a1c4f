"""A table of rows in plain numpy: what :class:`geartrain.ams.tables.row_table.RowTable` does, bit by bit.

Shapes: N ids, D width of a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.optimizers.spec import RowOptimizerSpec
from geartrain.ams.values.specs import DTYPES, Ids, Initializer
from tests.specification.ops import Floats, initial_row
from tests.specification.optimizers import UpdateStep, updated
from tests.specification.rounding import LATE_ROW, LATE_SLOT, ROW, SLOT, rounding_key, stored


@dataclass
class ReferenceTable:
    """A row table as a dict. Rows and slots are kept in their storage types; arithmetic is float32. Exact.

    An update is rounded to 16 bits by chance, an initial or assigned value to the nearest.
    """

    dim: int
    optimizer: RowOptimizerSpec
    initializer: Initializer
    seed: int
    table_hash: int
    dtype: str = "float32"
    slot_dtype: str = "float32"
    rows: dict[int, npt.NDArray[Any]] = field(default_factory=dict)
    slots: dict[int, npt.NDArray[Any]] = field(default_factory=dict)
    updates: dict[int, int] = field(default_factory=dict)
    """By id, how often it was pushed."""

    def row(self, row_id: int) -> npt.NDArray[Any]:
        """The row [D], or its initial value; creates nothing."""
        if row_id in self.rows:
            return self.rows[row_id]
        return initial_row(self.initializer, self.seed, self.table_hash, row_id, self.dim).astype(DTYPES[self.dtype])

    def pull(self, ids: Ids) -> npt.NDArray[Any]:
        """Rows [N, D]."""
        return np.stack([self.row(int(i)) for i in ids]) if len(ids) else np.empty((0, self.dim), DTYPES[self.dtype])

    def push(self, ids: Ids, gradients: npt.NDArray[Any], lr: float, scale: float = 1.0) -> int:
        """Update the rows of distinct ids; return how many were created."""
        before = len(self.rows)
        for row_id, gradient in zip(ids.tolist(), gradients, strict=True):
            self.updates[row_id] = t = self.updates.get(row_id, 0) + 1
            push = UpdateStep(lr, scale, t)
            row, slots = updated(self.optimizer, self.row(row_id), self.slots_of(row_id), gradient, push)
            self.store(row_id, row, slots, t)
        return len(self.rows) - before

    def slots_of(self, row_id: int) -> npt.NDArray[Any]:
        """The row's slots [S], one after the other; zero before its first update."""
        return self.slots.get(row_id, np.zeros(self.optimizer.slot_dim(self.dim), DTYPES[self.slot_dtype]))

    def store(self, row_id: int, row: Floats, slot: Floats, number: int, *, late: bool = False) -> None:
        """Keep a row [D] and its slot after its update ``number``."""
        key = rounding_key(self.seed, self.table_hash)
        parts = (LATE_ROW, LATE_SLOT) if late else (ROW, SLOT)
        self.rows[row_id], self.slots[row_id] = (
            stored(values, dtype, key=key, row_id=row_id, number=number, part=part)
            for values, dtype, part in zip((row, slot), (self.dtype, self.slot_dtype), parts, strict=True)
        )

    def assign(self, ids: Ids, rows: npt.NDArray[Any]) -> int:
        """Overwrite rows and forget their slots; return how many were created.

        Where an update depends on the number of those before, it begins anew; rounding alone goes on counting.
        """
        before = len(self.rows)
        for row_id, row in zip(ids.tolist(), rows, strict=True):
            self.rows[row_id] = row.copy()
            self.slots.pop(row_id, None)
            if self.optimizer.counts_updates:
                self.updates.pop(row_id, None)
        return len(self.rows) - before
