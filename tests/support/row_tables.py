"""What row tables hold, for comparison."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.specs import Ids, TableSpec
from tests.specification.row_table import ReferenceTable

Contents = dict[int, tuple[bytes, bytes, int]]
"""By id: the row, its slots, and the number of its updates where they count."""


def pulled(table: RowTable, ids: Ids) -> npt.NDArray[Any]:
    """Rows [N, D] of a table."""
    out = np.empty((len(ids), table.spec.dim), table.spec.numpy_dtype)
    table.pull(ids, out)
    return out


def rest_of(table: RowTable, most: int = 10_000) -> Contents:
    """What is still to be read of a frozen table, ``most`` rows at once."""
    contents: Contents = {}
    while len((part := table.read_frozen(most)).ids):
        ids, rows, slots, steps, _ = part
        slots = np.empty((len(ids), 0)) if slots is None else slots
        numbers = [0] * len(ids) if steps is None else steps.tolist()
        for row_id, row, slot, number in zip(ids.tolist(), rows, slots, numbers, strict=True):
            assert row_id not in contents, "a row was read twice"
            contents[row_id] = (row.tobytes(), slot.tobytes(), number)
    return contents


def contents_of(table: RowTable) -> Contents:
    """All that a table holds now."""
    table.freeze()
    contents = rest_of(table)
    table.thaw(kept=True)
    return contents


def contents_of_reference(table: ReferenceTable, spec: TableSpec) -> Contents:
    """What a table of ``spec`` must hold."""
    return {
        row_id: (
            row.tobytes(),
            table.slots_of(row_id).tobytes(),
            table.updates.get(row_id, 0) if spec.counts_updates else 0,
        )
        for row_id, row in table.rows.items()
    }
