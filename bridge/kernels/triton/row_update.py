"""Kernel that updates rows by their gradients: decay, step, test, rounding and store in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from geartrain.bridge.kernels.triton.row_step import (
    ADAM,
    ADAMW,
    ROW,
    ROWWISE_ADAGRAD,
    ROWWISE_ADAM,
    SGD,
    SLOT,
    fits,
    inverse_of,
    scale_of,
    step,
    stored,
    widened,
)


def tile(dim: int, *, by_block: bool = False) -> dict[str, int]:
    """Return tile sizes of :func:`update_rows` for rows of ``dim``; ``by_block``: slots have scales."""
    width = max(16, triton.next_power_of_2(dim))
    if by_block:
        width = max(128, width)
    rows = max(1, 1024 // width)
    return {"N": rows, "C": width, "num_warps": min(32, max(4, rows * width // 512))}


@triton.jit
def update_rows(
    rows,  # [L, D], float8_e4m3fn as uint8
    slots,  # [L, S], None
    updates,  # [L] int64, None
    row_scales,  # [L] bfloat16, None
    slot_scales,  # [L, K] bfloat16, None
    clock,  # int64, None: rounding draws by the counts of updates
    refused,  # int64
    gradient,  # [N, D] float32
    numbers,  # [N] int64, None: start …
    num_valid,  # int64, None: all
    scale,  # float32
    lr,  # a number, or float32 on the device
    start,
    num,
    first,  # id of row 0
    ids,  # [L] int64, None: first …
    key,
    decay,
    a,
    b,
    eps,
    D: tl.constexpr,
    KIND: tl.constexpr,
    LR_ON_DEVICE: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    B: tl.constexpr = 128,
):
    place = tl.program_id(0) * N + tl.arange(0, N)
    column = tl.arange(0, C)
    is_here = place < num
    if num_valid is not None:
        is_here &= place < tl.load(num_valid)
    if numbers is None:
        number = start + place.to(tl.int64)
    else:
        number = tl.load(numbers + place, mask=is_here, other=-1)
        is_here &= number >= 0
    mask = is_here[:, None] & (column < D)[None, :]
    step_size = lr
    if LR_ON_DEVICE:
        step_size = tl.load(lr)
    t = tl.zeros([N], tl.int64) + 1
    if updates is not None:
        t += tl.load(updates + number, mask=is_here, other=0)
    rows += number[:, None] * D + column[None, :]
    row = widened(tl.load(rows, mask=mask, other=0), rows.dtype.element_ty)
    if row_scales is not None:
        row_scales += number
        row *= tl.load(row_scales, mask=is_here, other=1.0).to(tl.float32)[:, None]
    grad = tl.load(gradient + place.to(tl.int64)[:, None] * D + column[None, :], mask=mask, other=0.0)
    grad *= tl.load(scale).to(tl.float32)
    slot, second = row, row
    if KIND == ROWWISE_ADAGRAD:
        slots += number
        second = tl.load(slots, mask=is_here, other=0.0).to(tl.float32)
    elif KIND == ROWWISE_ADAM:
        seconds = slots + number * (D + 1) + D
        slots += number[:, None] * (D + 1) + column[None, :]
        slot = tl.load(slots, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(seconds, mask=is_here, other=0.0).to(tl.float32)
    elif KIND == ADAM or KIND == ADAMW:  # noqa: SIM109
        slots += number[:, None] * (2 * D) + column[None, :]
        slot = tl.load(slots, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(slots + D, mask=mask, other=0.0).to(tl.float32)
    elif KIND != SGD:
        slots += number[:, None] * D + column[None, :]
        slot = widened(tl.load(slots, mask=mask, other=0), slots.dtype.element_ty)
        if slot_scales is not None:
            block = tl.arange(0, C // B)
            scale_mask = is_here[:, None] & (block * B < D)[None, :]
            slot_scales += number[:, None] * ((D + B - 1) // B) + block[None, :]
            scales = tl.load(slot_scales, mask=scale_mask, other=1.0).to(tl.float32)
            slot = tl.reshape(tl.reshape(slot, [N, C // B, B]) * scales[:, :, None], [N, C])

    row, slot, second = step(row, slot, second, grad, t, step_size, decay, a, b, eps, D, KIND)

    bad = _misfits(row, rows.dtype.element_ty)
    if KIND == ROWWISE_ADAGRAD:
        bad |= (~fits(second, tl.float32)).to(tl.int32)
    elif KIND == ROWWISE_ADAM:
        bad |= _misfits(slot, tl.float32) | (~fits(second, tl.float32)).to(tl.int32)
    elif KIND == ADAM or KIND == ADAMW:  # noqa: SIM109
        bad |= _misfits(slot, tl.float32) | _misfits(second, tl.float32)
    elif KIND != SGD:
        bad |= _misfits(slot, slots.dtype.element_ty)
    num_bad = tl.sum(tl.where(is_here, bad, 0)).to(tl.int64)
    tl.atomic_add(refused, num_bad, mask=num_bad > 0)
    is_good = is_here & (bad == 0)
    mask = mask & is_good[:, None]

    if ids is None:  # noqa: SIM108 (no tensor is a constant)
        id = first + number
    else:
        id = tl.load(ids + number, mask=is_good, other=0)
    drawn_by = t
    if clock is not None:
        drawn_by = tl.zeros([N], tl.int64) + tl.load(clock)
    if row_scales is not None:
        scale_N = scale_of(tl.max(tl.abs(row), axis=1), tl.uint8)
        row *= inverse_of(scale_N)[:, None]
        tl.store(row_scales, scale_N.to(tl.bfloat16), mask=is_good)
    tl.store(rows, stored(row, key, id, drawn_by, 0, ROW, C, rows.dtype.element_ty), mask=mask)
    if KIND == ROWWISE_ADAGRAD:
        tl.store(slots, second, mask=is_good)
    elif KIND == ROWWISE_ADAM:
        tl.store(slots, slot, mask=mask)
        tl.store(seconds, second, mask=is_good)
    elif KIND == ADAM or KIND == ADAMW:  # noqa: SIM109
        tl.store(slots, slot, mask=mask)
        tl.store(slots + D, second, mask=mask)
    elif KIND != SGD:
        if slot_scales is not None:
            blocks = tl.reshape(slot, [N, C // B, B])
            scales = scale_of(tl.max(tl.abs(blocks), axis=2), tl.int8)
            slot = tl.reshape(blocks * inverse_of(scales)[:, :, None], [N, C])
            tl.store(slot_scales, scales.to(tl.bfloat16), mask=scale_mask & is_good[:, None])
        tl.store(slots, stored(slot, key, id, drawn_by, 0, SLOT, C, slots.dtype.element_ty), mask=mask)
    if updates is not None:
        tl.store(updates + number, t, mask=is_good)


@triton.jit
def _misfits(value, dtype: tl.constexpr):
    """Return 1 for each row with a value that is not finite in ``dtype``, else 0. Columns beyond D are zero."""
    return tl.max((~fits(value, dtype)).to(tl.int32), axis=1)
