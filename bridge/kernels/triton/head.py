"""The kernels of ``bridge/kernels/head.py``, whose names they share.

Legend: N active rows of a tile, B samples, K of what a product sums over, D of a row's width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from geartrain.bridge.kernels.triton.row_step import (
    ROW,
    SLOT,
    fits,
    inverse_of,
    scale_of,
    step,
    stored,
    widened,
)

_NO_LOGIT = tl.constexpr(-1e37)
_NORM_FLOOR = tl.constexpr(1e-12)
_TINY = tl.constexpr(2.0**-126)
_SMALLEST_FACTOR = tl.constexpr(2.0**-40)


def exponentials_options(dtype: torch.dtype, *, wide: bool, codes: bool = False) -> dict[str, Any]:
    """Return tile sizes and warps of :func:`exponentials` for products of ``dtype``.

    ``wide``: rows of that dtype and more than 128 samples, without shifts. ``codes``: 8-bit rows, with shifts. A tile
    has 128 rows, which share a sum and a shift.
    """
    if dtype == torch.float32:
        return {"TILE_N": 128, "TILE_B": 64, "TILE_K": 32, "num_warps": 8, "num_stages": 3}
    # Without ``wide``, 128 x 256 spills registers on an A100 or with one of Triton's versions.
    stages = 2 if codes else 3
    return {"TILE_N": 128, "TILE_B": 256 if wide else 128, "TILE_K": 64, "num_warps": 8, "num_stages": stages}


@triton.jit
def exponentials(
    rows, scales, numbers, count, queries, positions, owners, out, inverse, sums, highest, log2_weight, start, stop,
    num_samples, middle,
    SHIFTED: tl.constexpr, DIM: tl.constexpr, TILE_N: tl.constexpr, TILE_B: tl.constexpr, TILE_K: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write a tile of E and its sums by sample; the first samples' programs also write inverse lengths."""
    blocks = tl.cdiv(num_samples, TILE_B)
    block = tl.program_id(0) % blocks
    tile = start // TILE_N + tl.program_id(0) // blocks
    n = tile * TILE_N + tl.arange(0, TILE_N)
    b = block * TILE_B + tl.arange(0, TILE_B)
    limit = stop
    if count is not None:
        limit = tl.minimum(tl.load(count), stop).to(tl.int32)
    is_row, is_sample = n < limit, b < num_samples
    at = n.to(tl.int64)
    if numbers is not None:
        at = tl.load(numbers + n, mask=is_row, other=0)
    row_at, query_at = rows + at[:, None] * DIM, queries + b[:, None] * DIM
    logits = tl.zeros((TILE_N, TILE_B), tl.float32)
    squares = tl.zeros((TILE_N,), tl.float32)
    for first in range(0, DIM, TILE_K):
        k = first + tl.arange(0, TILE_K)
        is_row_k, is_query_k = is_row[:, None], is_sample[:, None]
        if DIM % TILE_K:
            is_row_k, is_query_k = is_row_k & (k < DIM)[None, :], is_query_k & (k < DIM)[None, :]
        row = tl.load(row_at + k[None, :], mask=is_row_k, other=0)
        query = tl.load(query_at + k[None, :], mask=is_query_k, other=0.0)
        if scales is not None:
            row = widened(row, rows.dtype.element_ty)
        if inverse is not None:
            wide = row.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
        logits = tl.dot(row.to(query.dtype), tl.trans(query), logits, input_precision=PRECISION)
    length = tl.full((TILE_N,), 1.0, tl.float32)
    floor = _NORM_FLOOR
    if scales is not None:
        length = tl.load(scales + at, mask=is_row, other=1.0).to(tl.float32)
        floor = _NORM_FLOOR * inverse_of(length)
        if inverse is None:
            logits *= length[:, None]
            length = tl.maximum(length, _SMALLEST_FACTOR)
    if inverse is not None:
        length = 1.0 / tl.maximum(tl.sqrt(squares), floor)
        logits *= length[:, None]
        tl.store(inverse + n, length, mask=is_row & (block == 0))
    position = tl.load(positions + b, mask=is_sample, other=-1).to(tl.int32)
    counts = is_row[:, None] & (n[:, None] != position[None, :])
    logits = tl.where(counts, logits, _NO_LOGIT)
    shift = tl.full((TILE_B,), middle, tl.float32)
    at_sum = tile.to(tl.int64) * num_samples + b
    if highest is not None:
        largest = tl.max(logits, 0)
        tl.store(highest + at_sum, largest, mask=is_sample)
        if SHIFTED:
            shift = largest
    if log2_weight is not None:
        is_other = tl.load(owners + n, mask=is_row, other=0) < 0
        logits += tl.where(is_other, tl.load(log2_weight), 0.0)[:, None]
    exponential = tl.where(counts, tl.exp2(logits - shift[None, :]), 0.0)
    tl.store(sums + at_sum, tl.sum(exponential, 0), mask=is_sample)
    exponential *= length[:, None]
    out_at = out + (n - start).to(tl.int64)[:, None] * num_samples + b[None, :]
    tl.store(out_at, exponential.to(out.dtype.element_ty), mask=is_row[:, None] & is_sample[None, :])


def feature_gradient_options(dtype: torch.dtype, *, plain: bool, picked: bool) -> dict[str, Any]:
    """Return tile sizes and warps of :func:`feature_gradient` for exponentials of ``dtype``.

    ``plain``: all rows in one range, of that dtype, without shifts: two programs fit a processor. ``picked``: rows are
    given by numbers, which are fetched some stages earlier.
    """
    if dtype == torch.float32:
        return {"TILE_B": 64, "TILE_D": 128, "TILE_N": 32, "num_warps": 8, "num_stages": 5 if picked else 3}
    if plain and not picked:
        return {"TILE_B": 128, "TILE_D": 256, "TILE_N": 64, "num_warps": 8, "num_stages": 3}
    return {"TILE_B": 128, "TILE_D": 128, "TILE_N": 64, "num_warps": 8, "num_stages": 5 if picked else 3}


@triton.jit
def feature_gradient(
    rows, numbers, count, exponentials, highest, shifts, out, start, stop, num_samples, num_parts,
    ADDS: tl.constexpr, DIM: tl.constexpr, SUM_TILE: tl.constexpr, TILE_B: tl.constexpr, TILE_D: tl.constexpr,
    TILE_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write a tile of Eᵀ·W over one part of the classes, or add it to ``out``.

    Programs of one part are neighbours in the grid: they read the same rows.
    """
    blocks_d: tl.constexpr = (DIM + TILE_D - 1) // TILE_D
    tiles = tl.cdiv(num_samples, TILE_B) * blocks_d
    part, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    b = tile // blocks_d * TILE_B + tl.arange(0, TILE_B)
    d = tile % blocks_d * TILE_D + tl.arange(0, TILE_D)
    is_sample, is_column = b < num_samples, d < DIM
    limit = stop
    if count is not None:
        limit = tl.minimum(tl.load(count), stop).to(tl.int32)
    share = tl.cdiv(tl.cdiv(stop - start, TILE_N), num_parts) * TILE_N
    first = start + part * share
    gradient = tl.zeros((TILE_B, TILE_D), tl.float32)
    if shifts is not None:
        shift = tl.load(shifts + b, mask=is_sample, other=0.0)
    for at_n in range(first, tl.minimum(first + share, limit), TILE_N):
        n = at_n + tl.arange(0, TILE_N)
        is_row = n < limit
        at = n.to(tl.int64)
        if numbers is not None:
            at = tl.load(numbers + n, mask=is_row, other=0)
        exponential = tl.load(
            exponentials + (n - start).to(tl.int64)[:, None] * num_samples + b[None, :],
            mask=is_row[:, None] & is_sample[None, :],
            other=0.0,
        )
        is_value = is_row[:, None]
        if DIM % TILE_D:
            is_value &= is_column[None, :]
        row = tl.load(rows + at[:, None] * DIM + d[None, :], mask=is_value, other=0)
        if rows.dtype.element_ty == tl.uint8:
            row = widened(row, tl.uint8)
        if shifts is not None:
            largest = tl.load(
                highest + tl.cast(at_n // SUM_TILE, tl.int64) * num_samples + b, mask=is_sample, other=0.0
            )
            lifted = exponential.to(tl.float32) * tl.exp2(largest - shift)[None, :]
            exponential = lifted.to(exponential.dtype)
        gradient = tl.dot(tl.trans(exponential), row.to(exponential.dtype), gradient, input_precision=PRECISION)
    out_at = out + part.to(tl.int64) * num_samples * DIM + b[:, None] * DIM + d[None, :]
    is_out = is_sample[:, None] & is_column[None, :]
    if ADDS:  # no other program adds here: the atomic operation saves registers for the old value
        tl.atomic_add(out_at, gradient, mask=is_out, sem="relaxed")
    else:
        tl.store(out_at, gradient, mask=is_out)


def sample_terms_options(dim: int) -> dict[str, Any]:
    """Return tile sizes for rows of width ``dim``."""
    width = triton.next_power_of_2(dim)
    return {"TILE_D": width, "TILE_B": max(1, min(32, 8192 // width)), "num_warps": 4}


@triton.jit
def sample_terms(
    rows, numbers, inverse, positions, features, log_sums, own_weights, weights, keys, factors, own, own_along,
    bounds, num_samples, middle,
    SHIFTED: tl.constexpr, DIM: tl.constexpr, TILE_D: tl.constexpr, TILE_B: tl.constexpr,
):  # fmt: skip
    """Prepare one sample by program. Each sample of a class with several adds up all of them, in one order."""
    sample = tl.program_id(0)
    d = tl.arange(0, TILE_D)
    is_column = d < DIM
    feature = tl.load(features + sample * DIM + d, mask=is_column, other=0.0)
    weight = 1.0
    if weights is not None:
        weight = tl.load(weights + sample)
    own_weight = tl.load(own_weights + sample) * weight
    length = tl.sqrt(tl.sum(feature * feature, 0))
    tl.store(bounds + sample, length * (tl.abs(weight) + tl.abs(own_weight)))
    factor = weight
    if not SHIFTED:
        factor = weight * tl.exp2(middle - tl.load(log_sums + sample))
    tl.store(factors + sample, factor)
    tl.store(keys + sample * DIM + d, (feature * factor).to(keys.dtype.element_ty), mask=is_column)
    position = tl.load(positions + sample)
    gradient = tl.zeros((TILE_D,), tl.float32)
    along = 0.0
    if position >= 0:
        for first in range(0, num_samples, TILE_B):
            b = first + tl.arange(0, TILE_B)
            is_same = tl.load(positions + b, mask=b < num_samples, other=-1) == position
            if tl.max(is_same.to(tl.int32), 0) > 0:
                amount = tl.load(own_weights + b, mask=is_same, other=0.0)
                if weights is not None:
                    amount *= tl.load(weights + b, mask=is_same, other=0.0)
                alike = tl.load(
                    features + b[:, None] * DIM + d[None, :], mask=is_same[:, None] & is_column[None, :], other=0.0
                )
                gradient += tl.sum(alike * amount[:, None], 0)
        at = position
        if numbers is not None:
            at = tl.load(numbers + position)
        row = widened(tl.load(rows + at * DIM + d, mask=is_column, other=0), rows.dtype.element_ty)
        along = tl.sum(gradient * row, 0)
        if inverse is not None:
            along *= tl.load(inverse + position)
    tl.store(own + sample * DIM + d, gradient, mask=is_column)
    tl.store(own_along + sample, along)


def update_options(dtype: torch.dtype, *, light: bool, by_block: bool = False) -> dict[str, Any]:
    """Return tile sizes and warps of :func:`update_rows` for exponentials of ``dtype``.

    ``light``: on Hopper, rows and at most one slot, of 16 bits. ``by_block``: the slot has a scale for each 128
    numbers, which are a part.
    """
    # Fused multiply-adds would give steps other bits than elsewhere.
    options = {"num_warps": 8, "num_stages": 3, "enable_fp_fusion": False}
    if dtype == torch.float32:
        return {"TILE_D": 128 if by_block else 64, "TILE_B": 32, **options}
    if light:  # two programs a processor: one loads and stores while the other multiplies
        options["maxnreg"] = 128
    return {"TILE_D": 128, "TILE_B": 64, **options}


@triton.jit
def _halves(tile):
    """Return the left and right half of [N, D]."""
    return tl.split(tl.permute(tl.reshape(tile, (tile.shape[0], 2, tile.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _gradients(
    exponentials, keys, highest, log_sums, is_row, local, tile, first, num_samples,
    SHIFTED: tl.constexpr, DIM: tl.constexpr, TILE_N: tl.constexpr, TILE_D: tl.constexpr, TILE_B: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return Eᵀ·X̂ of a tile of rows and the columns from ``first`` on."""
    d = first + tl.arange(0, TILE_D)
    gradient = tl.zeros((TILE_N, TILE_D), tl.float32)
    for first_b in range(0, num_samples, TILE_B):
        sample = first_b + tl.arange(0, TILE_B)
        is_sample = sample < num_samples
        exponential = tl.load(
            exponentials + local + sample[None, :], mask=is_row[:, None] & is_sample[None, :], other=0.0
        )
        is_key = is_sample[:, None]
        if DIM % TILE_D:
            is_key &= (d < DIM)[None, :]
        key = tl.load(keys + sample[:, None] * DIM + d[None, :], mask=is_key, other=0.0)
        if SHIFTED:
            shift = tl.load(highest + tile * num_samples + sample, mask=is_sample, other=0.0)
            shift -= tl.load(log_sums + sample, mask=is_sample, other=0.0)
            exponential = (exponential.to(tl.float32) * tl.exp2(shift)[None, :]).to(exponential.dtype)
        gradient = tl.dot(exponential, key, gradient, input_precision=PRECISION)
    return gradient


@triton.jit
def update_rows(
    rows, slots, updates, row_scales, slot_scales, clock, numbers, count, exponentials, keys, factors, log_sums,
    highest, owners, own, own_along, bounds, inverse, factor, refused, squares, out, log2_weight, start, stop,
    num_samples, middle, logit_limit, first_id, seed, limit, loss, lr, decay, a, b, eps,
    LR_ON_DEVICE: tl.constexpr, KIND: tl.constexpr, KEEPS: tl.constexpr, SLOTS: tl.constexpr, SHIFTED: tl.constexpr,
    DIM: tl.constexpr, SUM_TILE: tl.constexpr, TILE_N: tl.constexpr, TILE_D: tl.constexpr, TILE_B: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a tile's gradients and update its rows, one part of their columns after another.

    Without ``refused``, write squares or gradients instead: ``squares``, ``out``.

    A row is stored whole or not at all. If bounds show that nothing in the tile leaves the range of its dtype, parts
    are stored as they are computed; else all parts are computed twice, the first time to check. So are 8-bit rows: a
    row's new scale is known only after all its parts. ``KEEPS``: their gradients, at most four parts, stay in registers
    between.

    ``length`` and ``along`` are those of codes, as for E, and so is the gradient until ``back``.
    """
    pieces: tl.constexpr = 4 if slot_scales is None else 8
    width: tl.constexpr = TILE_D // 4
    n = start + tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    end = stop
    if count is not None:
        end = tl.minimum(tl.load(count), stop).to(tl.int32)
    is_row = n < end
    if LR_ON_DEVICE:
        lr = tl.load(lr)
    at = n.to(tl.int64)
    if numbers is not None:
        at = tl.load(numbers + n, mask=is_row, other=0)
    local = (n - start).to(tl.int64)[:, None] * num_samples
    tile = tl.cast((start + tl.program_id(0) * TILE_N) // SUM_TILE, tl.int64)
    owner = tl.load(owners + n, mask=is_row, other=-1)
    is_owned = owner >= 0
    times = tl.load(factor)
    length = tl.full((TILE_N,), 1.0, tl.float32)
    along = tl.zeros((TILE_N,), tl.float32)
    scale, back = length, length
    if row_scales is not None:
        scale = tl.load(row_scales + at, mask=is_row, other=1.0).to(tl.float32)
        back = inverse_of(scale)
        if inverse is None:
            length = tl.maximum(scale, _SMALLEST_FACTOR)
            back = inverse_of(length)
    bound = 0.0
    if inverse is not None:
        length = tl.load(inverse + n, mask=is_row, other=1.0)
    offset = tl.log2(length)
    if log2_weight is not None:
        offset += tl.where(is_owned, 0.0, tl.load(log2_weight))
    for first in range(0, num_samples, TILE_B):
        sample = first + tl.arange(0, TILE_B)
        is_sample = sample < num_samples
        bound += tl.sum(tl.load(bounds + sample, mask=is_sample, other=0.0), 0)
        if inverse is not None:
            is_value = is_row[:, None] & is_sample[None, :]
            exponential = tl.load(exponentials + local + sample[None, :], mask=is_value, other=0.0).to(tl.float32)
            weight = tl.load(factors + sample, mask=is_sample, other=0.0)
            shift = tl.full((TILE_B,), middle, tl.float32)
            if SHIFTED:
                shift = tl.load(highest + tile * num_samples + sample, mask=is_sample, other=0.0)
                weight *= tl.exp2(shift - tl.load(log_sums + sample, mask=is_sample, other=0.0))
            logit = tl.log2(tl.maximum(exponential, _TINY)) - offset[:, None] + shift[None, :]
            along += tl.sum(exponential * weight[None, :] * logit, 1)
    if inverse is not None:
        along = along / (length * logit_limit) + tl.load(own_along + owner, mask=is_owned, other=0.0)
        along *= length * length
    # One look is enough where nothing is stored, or where nothing that is stored can be too large.
    looks = 1
    number = tl.zeros((TILE_N,), tl.int64)
    if refused is not None and updates is not None:
        number = tl.load(updates + at, mask=is_row, other=0) + 1
    if clock is not None:
        looks = 2
    elif refused is not None:
        calm = limit / (1.0 + loss * lr)
        # Not by a maximum with the others, which on a card passes over NaN.
        is_calm = tl.abs(times) * 2.0 * bound * length <= calm
        largest = tl.zeros((TILE_N,), tl.float32)
        for first in range(0, DIM, TILE_D):
            d = first + tl.arange(0, TILE_D)
            is_value = is_row[:, None] & (d < DIM)[None, :]
            value = tl.load(rows + at[:, None] * DIM + d[None, :], mask=is_value, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.max(tl.abs(value), 1))
        if SLOTS > 0:
            for first in range(0, SLOTS * DIM, TILE_D):
                d = first + tl.arange(0, TILE_D)
                is_value = is_row[:, None] & (d < SLOTS * DIM)[None, :]
                value = tl.load(slots + at[:, None] * (SLOTS * DIM) + d[None, :], mask=is_value, other=0.0).to(
                    tl.float32
                )
                largest = tl.maximum(largest, tl.max(tl.abs(value), 1))
        looks = tl.max(tl.where(is_row & ~(is_calm & (largest <= calm)), 2, 1), 0)
    drawn_by = number
    if clock is not None:
        drawn_by = tl.zeros((TILE_N,), tl.int64) + tl.load(clock)
    highest_value = tl.zeros((TILE_N,), tl.float32)
    is_bad = tl.zeros((TILE_N,), tl.int32)
    square = tl.zeros((TILE_N,), tl.float32)
    if KEEPS:
        for quarter in tl.static_range(4):
            if quarter * TILE_D < DIM:
                kept = _gradients(
                    exponentials, keys, highest, log_sums, is_row, local, tile, quarter * TILE_D, num_samples,
                    SHIFTED, DIM, TILE_N, TILE_D, TILE_B, PRECISION,
                )  # fmt: skip
                if quarter == 0:
                    part_a, part_b, part_c, part_d = kept, kept, kept, kept
                elif quarter == 1:
                    part_b = kept
                elif quarter == 2:
                    part_c = kept
                else:
                    part_d = kept
    for look in range(looks):
        new_scale = highest_value
        if row_scales is not None:
            new_scale = scale_of(highest_value, tl.uint8)
        for first in range(0, DIM, TILE_D):
            if KEEPS:
                gradient = tl.where(first < 2 * TILE_D, tl.where(first < TILE_D, part_a, part_b), part_c)
                gradient = tl.where(first < 3 * TILE_D, gradient, part_d)
            else:
                gradient = _gradients(
                    exponentials, keys, highest, log_sums, is_row, local, tile, first, num_samples,
                    SHIFTED, DIM, TILE_N, TILE_D, TILE_B, PRECISION,
                )  # fmt: skip
            # By quarters: a row, its slots and their random bits take registers beside the gradient.
            left, right = _halves(gradient)
            part0, part1 = _halves(left)
            part2, part3 = _halves(right)
            largest_slot = tl.zeros((TILE_N,), tl.float32)
            slot_scale, old_scale = scale, scale
            if slot_scales is not None:
                slot_scale_at = slot_scales + at * ((DIM + TILE_D - 1) // TILE_D) + first // TILE_D
                old_scale = tl.load(slot_scale_at, mask=is_row, other=1.0).to(tl.float32)
            # The scale of a block of a slot is known when all of it is: once more from the first quarter on.
            for piece in tl.static_range(pieces):
                part = part0 if piece % 4 == 0 else part1 if piece % 4 == 1 else part2 if piece % 4 == 2 else part3
                d = first + piece % 4 * width + tl.arange(0, width)
                is_value = is_row[:, None]
                if DIM % TILE_D:
                    is_value &= (d < DIM)[None, :]
                row_at = rows + at[:, None] * DIM + d[None, :]
                row = widened(tl.load(row_at, mask=is_value, other=0), rows.dtype.element_ty)
                is_own = is_value & is_owned[:, None]
                part += tl.load(own + owner[:, None] * DIM + d[None, :], mask=is_own, other=0.0) * length[:, None]
                if inverse is not None:
                    part -= row * along[:, None]
                part *= times
                if row_scales is not None:
                    part *= back[:, None]
                    row *= scale[:, None]
                if squares is not None:
                    square += tl.sum(tl.where(is_value, part * part, 0.0), 1)
                elif out is not None:
                    is_value = (n < stop)[:, None] & (d < DIM)[None, :]
                    tl.store(out + (n - start).to(tl.int64)[:, None] * DIM + d[None, :], part, mask=is_value)
                else:
                    slot, second = part, part
                    if SLOTS > 0:
                        slot_at = slots + at[:, None] * (SLOTS * DIM) + d[None, :]
                        slot = widened(tl.load(slot_at, mask=is_value, other=0), slots.dtype.element_ty)
                    if slot_scales is not None:
                        slot *= old_scale[:, None]
                    if SLOTS > 1:
                        second = tl.load(slot_at + DIM, mask=is_value, other=0.0).to(tl.float32)
                    row, slot, second = step(row, slot, second, part, number, lr, decay, a, b, eps, DIM, KIND)
                    if piece < pieces - 4:
                        largest_slot = tl.maximum(largest_slot, tl.max(tl.abs(slot), 1))
                    elif look + 1 < looks:
                        if row_scales is not None:
                            highest_value = tl.maximum(highest_value, tl.max(tl.abs(row), 1))
                        is_fit = fits(row, rows.dtype.element_ty)
                        if SLOTS > 0:
                            is_fit &= fits(slot, slots.dtype.element_ty)
                        if SLOTS > 1:
                            is_fit &= fits(second, slots.dtype.element_ty)
                        is_bad |= tl.max(tl.where(is_fit | ~is_value, 0, 1), 1)
                    else:
                        is_value &= (is_bad == 0)[:, None]
                        column, ids = first + piece % 4 * width, first_id + at
                        if row_scales is not None:
                            row *= inverse_of(new_scale)[:, None]
                        made = stored(row, seed, ids, drawn_by, column, ROW, width, rows.dtype.element_ty)
                        tl.store(row_at, made, mask=is_value)
                        if slot_scales is not None:
                            slot_scale = scale_of(largest_slot, tl.int8)
                            slot *= inverse_of(slot_scale)[:, None]
                        if SLOTS > 0:
                            made_slot = stored(slot, seed, ids, drawn_by, column, SLOT, width, slots.dtype.element_ty)
                            tl.store(slot_at, made_slot, mask=is_value)
                        if piece == 7:
                            tl.debug_barrier()  # every warp has the old one
                            tl.store(slot_scale_at, slot_scale.to(tl.bfloat16), mask=is_row & (is_bad == 0))
                        if SLOTS > 1:
                            tl.store(slot_at + DIM, second, mask=is_value)
    if squares is not None:
        tl.store(squares + tl.program_id(0), tl.sum(square, 0))
    if refused is not None:
        if row_scales is not None:
            new_scale = scale_of(highest_value, tl.uint8)
            tl.store(row_scales + at, new_scale.to(tl.bfloat16), mask=is_row & (is_bad == 0))
        if updates is not None:
            tl.store(updates + at, number, mask=is_row & (is_bad == 0))
        num_bad = tl.sum(is_bad, 0)
        if num_bad > 0:
            tl.atomic_add(refused, num_bad.to(tl.int64))
