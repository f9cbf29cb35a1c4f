"""A table's float32 rows in arrays of the caller's: read and updated where they lie, without an index or a lock.

Legend: L rows of the arrays, N of a call, D width. Row numbers are places in the arrays. Threads may work side by side
on different rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from geartrain.ams.core import _core
from geartrain.ams.specs import Ids, TableSpec
from geartrain.ams.tables.row_table import update_rule

Rows = npt.NDArray[np.float32]


def gather(rows: Rows, numbers: Ids, out: Rows) -> None:
    """Copy the rows [L, D] of ``numbers`` [N] to ``out`` [N, D]. Raises ValueError for a number outside [0, L)."""
    _core.gather_rows(rows, numbers, out)


def update(
    spec: TableSpec, rows: Rows, slots: Rows | None, numbers: Ids | None, gradients: Rows, *, lr: float, scale: float
) -> int:
    """Make one step of the table's optimizer, SGD, Momentum or SparseMomentum without elapsed steps.

    Args:
        spec: What the table is.
        rows: [L, D].
        slots: [L, D], or None for SGD.
        numbers: [N], distinct, of the rows that have a gradient; None: all, in order.
        gradients: [N, D].
        lr: Learning rate of this step.
        scale: Factor of the gradients.

    Returns:
        How many rows were left as they were, with their slots, because a gradient or what it leads to is not finite.

    Raises:
        ValueError: shapes that do not fit, or a number outside [0, L).
    """
    rule, momentum = update_rule(spec.optimizer)
    return _core.update_rows(
        rows, slots, numbers, gradients, rule, lr, scale, momentum=momentum, weight_decay=spec.optimizer.weight_decay
    )
