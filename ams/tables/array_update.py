"""Row updates in the caller's arrays, in place, without an index or a lock.

Legend: L rows of the arrays, N of a call, D width. Row numbers are places in the arrays. Threads may update
different rows at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels import _core, ops
from geartrain.ams.tables.compiled_store import table_hash
from geartrain.ams.values.optimizers.spec import RowOptimizerSpec
from geartrain.ams.values.specs import Ids, TableSpec

Float32Rows = npt.NDArray[np.float32]


def gather(rows: Float32Rows, numbers: Ids, out: Float32Rows) -> None:
    """Copy the rows [L, D] of ``numbers`` [N] to ``out`` [N, D]. Raises ValueError for a number outside [0, L)."""
    _core.gather_rows(rows, numbers, out)


def update(
    spec: TableSpec,
    rows: npt.NDArray[Any],
    slots: npt.NDArray[Any] | None,
    numbers: Ids | None,
    gradients: Float32Rows,
    *,
    optimizer: RowOptimizerSpec,
    scale: float,
    steps: Ids | None = None,
    first_id: int = 0,
    ids: Ids | None = None,
    catch_up: _core.CatchUp | None = None,
) -> int:
    """Do one step of an optimizer, bit-identical to a push.

    Args:
        spec: What the table is.
        rows: [L, D] of the table's dtype.
        slots: [L, slot_dim], or None where there are none.
        numbers: [N], distinct, of the rows that have a gradient; None: all, in order.
        gradients: [N, D].
        optimizer: The table's, or it with other numbers; its learning rate is that of this step.
        scale: Factor of the gradients.
        steps: [L], the number of each row's updates, or its last step, for a table that counts either; else None.
        first_id: Id of row 0; those of the others follow.
        ids: [N], of the rows that have a gradient, where they do not follow one another.
        catch_up: Where untouched rows move, the steps that have ended: rows are caught up before their own, which the
            caller ends once all of its rows are updated.

    Returns:
        How many rows were left as they were, with their slots, because a gradient or what it leads to is not finite.

    Raises:
        ValueError: shapes that do not fit, or a number outside [0, L).
    """
    row_bits, row_code = ops.as_bits(rows)
    slot_bits, slot_code = (None, 0) if slots is None else ops.as_bits(slots, "slots")
    return _core.update_rows(
        rows=row_bits,
        dtype=row_code,
        slots=slot_bits,
        slot_dtype=slot_code,
        steps=steps,
        numbers=numbers,
        gradients=gradients,
        first_id=first_id,
        seed=spec.seed,
        table_hash=table_hash(spec.name),
        optimizer=ops.compiled_optimizer(optimizer),
        lr=optimizer.lr,
        scale=scale,
        catch_up=catch_up,
        ids=ids,
    )


def read(
    rows: npt.NDArray[Any],
    slots: npt.NDArray[Any],
    steps: Ids,
    numbers: Ids | None,
    out: Float32Rows,
    *,
    catch_up: _core.CatchUp,
) -> None:
    """Write the rows [L, D] of ``numbers`` [N] (None: all), caught up, to ``out`` [N, D], as a pull does.

    Args as for :func:`update`; nothing else is written. Raises ValueError as that does.
    """
    row_bits, row_code = ops.as_bits(rows)
    slot_bits, slot_code = ops.as_bits(slots, "slots")
    _core.read_rows(
        rows=row_bits,
        dtype=row_code,
        slots=slot_bits,
        slot_dtype=slot_code,
        steps=steps,
        numbers=numbers,
        catch_up=catch_up,
        out=out,
    )
