"""Checks of arrays and numbers before a table's rows change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels import _core, ops
from geartrain.ams.values.errors import InvalidArgument, InvalidRows
from geartrain.ams.values.specs import DTYPES, Ids, TableSpec

_MAX_UPDATES = 2**53


def checked_factors(
    spec: TableSpec, lr: float | None, scale: float, optimizer_scalars: Mapping[str, float]
) -> tuple[_core.Optimizer, float]:
    """Return the optimizer and the learning rate. Raises InvalidArgument."""
    lr = spec.optimizer.lr if lr is None else lr
    with np.errstate(over="ignore"):
        if not (lr >= 0 and np.isfinite(np.float32(lr))):
            raise InvalidArgument(f"lr is {lr!r}; it must be finite (as float32) and >= 0")
        if not np.isfinite(np.float32(scale)):
            raise InvalidArgument(f"scale is {scale!r}; it must be finite (as float32)")
    return ops.compiled_optimizer(spec.optimizer.for_push(optimizer_scalars)), lr


def checked_gradients(spec: TableSpec, ids: Ids, gradients: npt.NDArray[Any]) -> tuple[Ids, npt.NDArray[Any], int]:
    """Return ids [N], and gradients [N, D] as bits and a type's code. Raises InvalidIds, InvalidRows."""
    ids = ops.checked_ids(ids)
    require_rows(spec, gradients, len(ids), "gradients", None)
    return ids, *ops.as_bits(gradients, "gradients")


def require_rows(
    spec: TableSpec, rows: Any, count: int | None, label: str, dtype: np.dtype[Any] | None, width: int | None = None
) -> None:
    """Check [count, width] (any length if None; width D) and the dtype (any float type if None)."""
    width = spec.dim if width is None else width
    if not isinstance(rows, np.ndarray) or (
        rows.dtype not in ops.DTYPE_CODES if dtype is None else rows.dtype != dtype
    ):
        found = rows.dtype if isinstance(rows, np.ndarray) else type(rows).__name__
        wanted = dtype if dtype is not None else ", ".join(DTYPES)
        raise InvalidRows(f"{label} of table {spec.name!r} is {found}; it must be a numpy array of {wanted}")
    if rows.ndim != 2 or rows.shape[1] != width or (count is not None and rows.shape[0] != count):
        wanted_shape = f"[{'M' if count is None else count}, {width}]"
        raise InvalidRows(f"{label} of table {spec.name!r} is {list(rows.shape)}; it must be {wanted_shape}")


def checked_state(
    spec: TableSpec,
    num_rows: int,
    slots: npt.NDArray[Any] | None,
    steps: Ids | None,
    lives: npt.NDArray[Any] | None,
) -> Ids | None:
    """Check the state restored beside rows; return the steps, zeros if they are absent and optional.

    Raises InvalidRows.
    """
    if lives is not None and lives.shape != (num_rows,):
        raise InvalidRows(f"table {spec.name!r} was given {len(lives)} lives for {num_rows} rows; give one for each")
    if (slots is not None) != spec.has_slots:
        wanted = "has slots, and none were given" if spec.has_slots else "has no slots, and some were given"
        raise InvalidRows(f"table {spec.name!r} {wanted}; give rows of a table with the same optimizer")
    if slots is not None:
        require_rows(spec, slots, num_rows, "slots", DTYPES[spec.slot_dtype], spec.slot_dim)
    if steps is None and spec.counts_updates and not spec.needs_step_numbers:
        steps = np.zeros(num_rows, np.int64)
    counts = bool(spec.step_bytes)
    if (steps is not None) != counts or (steps is not None and len(steps) != num_rows):
        raise InvalidRows(
            f"table {spec.name!r} {'counts' if counts else 'does not count'} the steps of its "
            f"rows; {'no' if steps is None else len(steps)} steps were given for {num_rows} rows"
        )
    if slots is not None:
        _require_slots(spec, slots)
    if spec.counts_updates and steps is not None:
        _require_updates(spec, steps)
    return steps


def _require_slots(spec: TableSpec, slots: npt.NDArray[Any]) -> None:
    optimizer, end = spec.optimizer, 0
    for slot in optimizer.slots:
        begin, end = end, end + slot.width(spec.dim)
        if slot.is_non_negative and np.any(slots[:, begin:end] < 0):
            raise InvalidRows(
                f"{type(optimizer).__name__}'s state of table {spec.name!r} holds a {slot.name} below 0; "
                "restore an undamaged snapshot"
            )


def _require_updates(spec: TableSpec, updates: Ids) -> None:
    if np.any(updates < 0) or np.any(updates > _MAX_UPDATES):
        raise InvalidRows(
            f"the state of table {spec.name!r} holds a number of updates outside [0, {_MAX_UPDATES}]; "
            "restore an undamaged snapshot"
        )
