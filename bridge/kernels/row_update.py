"""Update of rows on a device: decay, optimizer step, finite test, stochastic rounding and store in one pass.

Legend: L rows of this rank, N rows of a call, D width, S numbers of a row's slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.bridge.kernels.launch import Cost, launch, runs_kernels
from geartrain.bridge.kernels.optimizers import RowStep, StepNumbers, step_numbers, update_rows
from geartrain.bridge.kernels.rounding import ROW, SLOT, draws, round_rows
from geartrain.bridge.kernels.scaled import narrowed, widened

_LARGEST_SCALED = 2.0**126
_MAX_COLUMNS = 16_384

RowIndex = slice | Tensor
"""Rows of this rank: a slice, or distinct row numbers [N], int64 on the device; −1: padding."""


@dataclass(frozen=True, eq=False, kw_only=True)
class RowArrays:
    """Rows on a device, with their slots, scales and counts of updates."""

    rows_LD: Tensor
    """float32, bfloat16, float16 or float8_e4m3fn."""
    slots_LS: Tensor | None
    """float32, bfloat16, float16 or int8, one slot after another; None: the optimizer has none."""
    updates_L: Tensor | None
    """int64, number of updates of each row; None: not counted."""
    row_scales_LK: Tensor | None = None
    """bfloat16 [L, 1], scales of 8-bit rows: see ``scaled.py``; else None."""
    slot_scales_LK: Tensor | None = None
    """bfloat16, scales of 8-bit slots; else None."""
    clock: Tensor | None = None
    """int64, 0-dim, number of the step, from which rounding draws where rows or slots have 8 bits; else None."""
    refused: Tensor
    """int64, 0-dim, counter: rows whose update was refused are added to it."""
    first: int
    """Id of row 0."""
    key: int
    """Key of the rounding: ``rounding_key`` of the table."""
    ids_L: Tensor | None = None
    """int64, ids of the rows; None: consecutive ids from ``first``."""

    def rows(self, index: RowIndex, dtype: torch.dtype) -> Tensor:
        """Return a copy of the rows [N, D] as ``dtype``."""
        return _read(self.rows_LD, self.row_scales_LK, index, dtype)

    def slots(self, index: RowIndex, dtype: torch.dtype) -> Tensor | None:
        """Return a copy of the slots [N, S] as ``dtype``; None: the optimizer has none."""
        return None if self.slots_LS is None else _read(self.slots_LS, self.slot_scales_LK, index, dtype)

    def ids(self, numbers_N: Tensor) -> Tensor:
        """Return the ids [N] of rows by their numbers."""
        return numbers_N + self.first if self.ids_L is None else self.ids_L[numbers_N]

    def numbers(self, index: RowIndex) -> Tensor:
        """Return the numbers [N] of the rows."""
        if isinstance(index, Tensor):
            return index
        return torch.arange(*index.indices(len(self.rows_LD)), device=self.rows_LD.device)


def _read(stored: Tensor, scales: Tensor | None, index: RowIndex, dtype: torch.dtype) -> Tensor:
    if scales is not None:
        return widened(stored[index], scales[index], dtype)
    return stored[index].to(dtype, copy=True)


def is_one_kernel(optimizer: RowOptimizerSpec, dim: int, device: torch.device) -> bool:
    """Return whether one kernel updates these rows in place: up to 16,384 columns, optimizers of ``step_numbers``."""
    return dim <= _MAX_COLUMNS and step_numbers(optimizer) is not None and runs_kernels(device)


def update(
    stored: RowArrays,
    index: RowIndex,
    gradient_ND: Tensor,
    optimizer: RowOptimizerSpec,
    *,
    lr: float | Tensor,
    scale: Tensor,
    num_valid: Tensor | None = None,
) -> None:
    """Make one step of ``optimizer`` with ``scale`` times the gradient, computed in the gradient's dtype.

    A row whose values or slots would leave the range of their storage type stays unchanged, with its slots and its
    count of updates, and is counted in ``refused``.

    Args:
        stored: The rows, updated in place.
        index: Rows to update.
        gradient_ND: float32 or float64, contiguous; it may be overwritten.
        optimizer: Its learning rate is ignored.
        lr: A number; or float32, 0-dim, on the device.
        scale: 0-dim, on any device; if on the rows' device, the host does not wait.
        num_valid: int64, 0-dim, on the device: rows after the first ``num_valid`` are padding; None: no padding.

    One kernel for float32 where :func:`is_one_kernel`; otherwise tensor operations.
    """
    numbers = step_numbers(optimizer)
    is_float = gradient_ND.dtype == torch.float32
    if numbers is not None and is_float and is_one_kernel(optimizer, gradient_ND.shape[1], stored.rows_LD.device):
        _launch(stored, index, gradient_ND, numbers, lr, scale, num_valid)
        return
    gradient_ND.mul_(scale)
    numbers_N = stored.numbers(index)
    if num_valid is not None:
        numbers_N = torch.where(torch.arange(len(numbers_N), device=numbers_N.device) < num_valid, numbers_N, -1)
    at_N = numbers_N.clamp(min=0)
    rows_ND, slots_NS = stored.rows(at_N, gradient_ND.dtype), stored.slots(at_N, gradient_ND.dtype)
    updates_N = None if stored.updates_L is None else stored.updates_L[at_N] + 1
    update_rows(optimizer, RowStep(rows_ND, slots_NS, gradient_ND, float(lr), updates_N))
    store(stored, numbers_N, rows_ND, slots_NS, updates_N)


def store(
    stored: RowArrays, numbers_N: Tensor, rows_ND: Tensor, slots_NS: Tensor | None, updates_N: Tensor | None
) -> None:
    """Round rows and slots stochastically and store them, with ``updates_N``; refuse rows as :func:`update` does.

    Entries of −1 in ``numbers_N`` are skipped. The host does not wait.
    """
    at_N = numbers_N.clamp(min=0)
    keeps_N = numbers_N < 0
    found = [(stored.rows_LD, stored.row_scales_LK, rows_ND, ROW)]
    if stored.slots_LS is not None and slots_NS is not None:
        found.append((stored.slots_LS, stored.slot_scales_LK, slots_NS, SLOT))
    changed: list[tuple[Tensor, Tensor]] = []
    drawn_by_N = updates_N if stored.clock is None else stored.clock.expand(len(numbers_N))
    for old, old_scales, values, part in found:
        ids_N = stored.ids(at_N)
        if old_scales is not None and drawn_by_N is not None:
            drawn_ND = draws(stored.key, ids_N, drawn_by_N, part, values.shape[1])
            keeps_N = keeps_N | ~(values.abs() <= _LARGEST_SCALED).all(1)
            values, scales = narrowed(values, old.dtype, drawn_ND)
            changed.append((old_scales, scales))
        elif values.dtype == old.dtype or old.dtype == torch.float32 or drawn_by_N is None:
            values = values.to(old.dtype)
        else:
            values = round_rows(values, old.dtype, key=stored.key, ids_N=ids_N, numbers_N=drawn_by_N, part=part)
        if old_scales is None:
            keeps_N = keeps_N | ~torch.isfinite(values).all(1)
        changed.append((old, values))
    if stored.updates_L is not None and updates_N is not None:
        changed.append((stored.updates_L, updates_N))
    stored.refused.add_((keeps_N & (numbers_N >= 0)).sum())
    for old, values in changed:
        # Padding points to row 0, which may be in the call itself: padding adds 0 to it.
        kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[old.dtype.itemsize]
        bits, keeps = old.view(kind), keeps_N.view(-1, *[1] * (old.ndim - 1))
        bits.index_add_(0, at_N, torch.where(keeps, 0, values.contiguous().view(kind) - bits[at_N]))


def _launch(
    stored: RowArrays,
    index: RowIndex,
    gradient_ND: Tensor,
    numbers: StepNumbers,
    lr: float | Tensor,
    scale: Tensor,
    num_valid: Tensor | None,
) -> None:
    from geartrain.bridge.kernels.triton import row_step
    from geartrain.bridge.kernels.triton.row_update import tile
    from geartrain.bridge.kernels.triton.row_update import update_rows as kernel

    num, dim = gradient_ND.shape
    options = tile(dim, by_block=stored.slot_scales_LK is not None)
    rows_LD = stored.rows_LD if stored.row_scales_LK is None else stored.rows_LD.view(torch.uint8)
    by_number = isinstance(index, Tensor)
    start = 0 if isinstance(index, Tensor) else index.indices(len(stored.rows_LD))[0]
    launch(
        kernel,
        (-(-num // options["N"]),),
        rows_LD,
        stored.slots_LS,
        stored.updates_L,
        stored.row_scales_LK,
        stored.slot_scales_LK,
        stored.clock,
        stored.refused,
        gradient_ND,
        index if by_number else None,
        num_valid,
        scale.to(gradient_ND.device, torch.float32, non_blocking=True),
        lr,
        start,
        num,
        stored.first,
        stored.ids_L,
        stored.key,
        numbers.decay,
        numbers.a,
        numbers.b,
        numbers.eps,
        cost=Cost(num * (bytes_per_row(stored) + 4 * dim + 8 * by_number)),
        D=dim,
        KIND=getattr(row_step, numbers.kind),
        LR_ON_DEVICE=isinstance(lr, Tensor),
        enable_fp_fusion=False,
        **options,
    )


def bytes_per_row(stored: RowArrays) -> int:
    """Return the bytes that an update reads and writes for one row."""
    parts = (stored.rows_LD, stored.slots_LS, stored.updates_L, stored.row_scales_LK, stored.slot_scales_LK)
    return 2 * sum(part[:1].nbytes for part in parts if part is not None)
