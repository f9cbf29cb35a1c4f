"""Kernels of :mod:`geartrain.bridge.kernels.lookup`. A key is a table and an id in it: table << bits | id."""

from __future__ import annotations

import triton
import triton.language as tl

from geartrain.bridge.kernels.triton.hashing import owner
from geartrain.bridge.kernels.triton.row_step import (
    ADAM,
    ADAMW,
    ROW,
    ROWWISE_ADAGRAD,
    ROWWISE_ADAM,
    SLOT,
    draws,
    fits,
    rounded,
    step,
)

_ELEMENTS = 2048


def pool_tile(dim: int) -> dict[str, int]:
    """Return vectors of a program, padded width and warps."""
    width = max(4, triton.next_power_of_2(dim))
    return {
        "BLOCK_V": max(1, min(128, 2 * _ELEMENTS // width)),
        "BLOCK_D": width,
        "num_warps": 4 if width <= 2048 else 8,
    }


def run_tile(dim: int) -> dict[str, int]:
    """Return entries of a program, padded width and warps; partial sums cover as many entries."""
    width = max(8, triton.next_power_of_2(dim))
    return {"BLOCK_N": max(1, min(64, _ELEMENTS // width)), "BLOCK_D": width, "num_warps": 4 if width <= 2048 else 8}


@triton.jit
def index_fields(
    fields, ids_N, offsets, weights_N, key_N, place_N, bounds_V, factor_V, status,
    bits, none, ranks,
    WEIGHTED: tl.constexpr, FACTORED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write each id's key and vector, and each vector's start and factor."""
    field = tl.program_id(1).to(tl.int64)
    meta = fields + field * 10
    table = tl.load(meta)
    last = tl.load(meta + 1)
    first = tl.load(meta + 2)
    num_ids = tl.load(meta + 3)
    first_vector = tl.load(meta + 4)
    num_vectors = tl.load(meta + 5)
    length = tl.load(meta + 6)
    offsets_at = offsets + tl.load(meta + 7)
    padding = tl.load(meta + 8)
    flags = tl.load(meta + 9)  # 1: there is a padding id; 2: mean; 4: sqrtn; 8: any id, of which the key has the rank
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
    is_id = at < num_ids
    ids = tl.load(ids_N + first + at, mask=is_id, other=0).to(tl.int64)
    is_padding = (ids == padding) & ((flags & 1) != 0)
    is_bad = is_id & (is_padding == 0) & ((ids < 0) | (ids > last))
    bag = at
    if length > 0:
        bag = at // length
    else:
        low = tl.zeros_like(at)  # binary search: the last vector that begins at or before the id
        high = low + num_vectors
        steps = 0
        left = num_vectors
        while left > 0:
            middle = (low + high) // 2
            begins = tl.load(offsets_at + middle, mask=is_id & (middle < num_vectors), other=0)
            is_before = (begins <= at) & (middle < high)
            low = tl.where(is_before & (low < high), middle + 1, low)
            high = tl.where(is_before, high, middle)
            left = left // 2
            steps += 1
        bag = tl.maximum(low - 1, 0)
    if (flags & 8) != 0:
        ids = owner(ids, ranks)
    tl.store(key_N + first + at, tl.where(is_bad | is_padding, none, (table << bits) | ids), mask=is_id)
    tl.store(place_N + first + at, (field << 40) | bag, mask=is_id)
    is_vector = at < num_vectors
    begin = at * length
    end = begin + length
    wrong = tl.max(is_bad.to(tl.int32), 0)
    if length == 0:
        begin = tl.load(offsets_at + at, mask=is_vector, other=0)
        end = tl.load(offsets_at + at + 1, mask=is_vector, other=0)
        is_off = ((at == 0) & (begin != 0)) | ((at == num_vectors - 1) & (end != num_ids)) | (end < begin)
        wrong = tl.maximum(wrong, tl.max((is_vector & is_off).to(tl.int32), 0) * 2)
        begin = tl.minimum(tl.maximum(begin, 0), num_ids)
        end = tl.minimum(tl.maximum(end, begin), num_ids)
    tl.store(bounds_V + first_vector + at, first + begin, mask=is_vector)
    tl.store(bounds_V + first_vector + at + 1, first + end, mask=is_vector & (at == num_vectors - 1))
    if WEIGHTED:
        weights = tl.load(weights_N + first + at, mask=is_id, other=0.0)
        is_wild = fits(weights, tl.float32) == 0
        wrong = tl.maximum(wrong, tl.max((is_id & is_wild).to(tl.int32), 0) * 3)
    if wrong > 0:
        tl.atomic_max(status, (tl.num_programs(1) - field) * 4 + wrong)
    if FACTORED:
        total = tl.zeros([BLOCK], tl.float32)
        if (flags & 6) != 0:
            longest = tl.max(tl.where(is_vector, end - begin, 0), 0)
            for turn in range(longest):
                here = begin + turn
                counts = is_vector & (here < end)
                own = tl.load(ids_N + first + here, mask=counts, other=0).to(tl.int64)
                counts &= ((own == padding) & ((flags & 1) != 0)) == 0
                weight = counts.to(tl.float32)
                if WEIGHTED:
                    weight = tl.load(weights_N + first + here, mask=counts, other=0.0)
                total += tl.where((flags & 4) != 0, weight * weight, weight)
            by = tl.where((flags & 4) != 0, tl.sqrt(total), total)
            total = tl.where(total == 0, 0.0, 1.0 / tl.where(total == 0, 1.0, by))
        else:
            total += 1.0
        tl.store(factor_V + first_vector + at, total, mask=is_vector)


@triton.jit
def pool_rows(
    pieces, like, key_N, bounds_V, weights_N, factor_V,
    bits, none,
    WEIGHTED: tl.constexpr, FACTORED: tl.constexpr, DIM: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[v] = factor · Σ w · row over the ids of each vector of a piece."""
    piece = pieces + tl.program_id(1).to(tl.int64) * 4
    rows = tl.load(piece).to(like.dtype)
    first_vector = tl.load(piece + 1)
    num_vectors = tl.load(piece + 2)
    out = tl.load(piece + 3).to(factor_V.dtype)
    if ALIGNED:
        rows = tl.multiple_of(rows, 16)
        out = tl.multiple_of(out, 16)
    at = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V).to(tl.int64)
    is_vector = at < num_vectors
    begin = tl.load(bounds_V + first_vector + at, mask=is_vector, other=0)
    end = tl.load(bounds_V + first_vector + at + 1, mask=is_vector, other=0)
    columns = tl.arange(0, BLOCK_D)
    is_column = (columns < DIM)[None, :]
    id_mask = (tl.full([], 1, tl.int64) << bits) - 1
    sums = tl.zeros([BLOCK_V, BLOCK_D], tl.float32)
    key = tl.load(key_N + begin, mask=is_vector & (begin < end), other=none)
    for turn in range(tl.max(end - begin, 0)):
        following = begin + turn + 1
        next_key = tl.load(key_N + following, mask=following < end, other=none)
        counts = key < none
        row = key & id_mask  # 0 for no id
        values = tl.load(rows + row[:, None] * DIM + columns[None, :], mask=counts[:, None] & is_column, other=0.0)
        if WEIGHTED:
            weight = tl.load(weights_N + following - 1, mask=counts, other=0.0)
            sums += values.to(tl.float32) * weight[:, None]
        else:
            sums += values.to(tl.float32)
        key = next_key
    if FACTORED:
        sums *= tl.load(factor_V + first_vector + at, mask=is_vector, other=0.0)[:, None]
    tl.store(out + at[:, None] * DIM + columns[None, :], sums, mask=is_vector[:, None] & is_column)


@triton.jit
def find_bad_numbers(tensors, like, found, BLOCK: tl.constexpr):
    """Find numbers that are not finite in matrices of any strides; ``found`` becomes NaN."""
    meta = tensors + tl.program_id(1).to(tl.int64) * 5
    dim = tl.load(meta + 1)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    first = start // dim
    local = (start - first * dim).to(tl.int32) + tl.arange(0, BLOCK)
    row = first + local // dim.to(tl.int32)
    column = (local % dim.to(tl.int32)).to(tl.int64)
    is_value = row < tl.load(meta)
    at = tl.load(meta + 2).to(like.dtype) + row * tl.load(meta + 3) + column * tl.load(meta + 4)
    values = tl.load(at, mask=is_value, other=0.0)
    if tl.max((is_value & (fits(values, tl.float32) == 0)).to(tl.int32), 0) > 0:
        tl.store(found, float("nan"))


@triton.jit
def _gradients(
    pieces, order_N, place_N, weights_N, factor_V, at, is_entry, columns,
    WEIGHTED: tl.constexpr, FACTORED: tl.constexpr, DIM: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Return the gradients [N, D] of entries at these places of the sorted order, weighted as for their rows."""
    entry = tl.load(order_N + at, mask=is_entry, other=0)
    place = tl.load(place_N + entry, mask=is_entry, other=0)
    piece = pieces + (place >> 40) * 4
    vector = place & ((1 << 40) - 1)
    address = tl.load(piece, mask=is_entry, other=0)
    counts = is_entry & (address != 0)
    stride = tl.load(piece + 1, mask=is_entry, other=0)
    factor = tl.load(piece + 2, mask=is_entry, other=0).to(tl.int32).to(tl.float32, bitcast=True)
    if WEIGHTED:
        factor *= tl.load(weights_N + entry, mask=counts, other=0.0)
    if FACTORED:
        factor *= tl.load(factor_V + tl.load(piece + 3, mask=is_entry, other=0) + vector, mask=counts, other=0.0)
    begin = (address + vector * stride * 4).to(factor_V.dtype)
    if ALIGNED:
        begin = tl.multiple_of(begin, [16])
    is_value = counts[:, None] & (columns < DIM)[None, :]
    return tl.load(begin[:, None] + columns[None, :], mask=is_value, other=0.0) * factor[:, None]


@triton.jit
def open_runs(
    pieces, tables, key_N, order_N, place_N, weights_N, factor_V, partial,
    num_entries, bits,
    WEIGHTED: tl.constexpr, FACTORED: tl.constexpr, DIM: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write for each block of sorted keys whose last run continues in the next one that run's sum here."""
    block = tl.program_id(0).to(tl.int64)
    after = (block + 1) * BLOCK_N
    if after < num_entries:
        key = tl.load(key_N + after - 1)
        if key == tl.load(key_N + after):  # noqa: SIM102 (both sides are evaluated)
            if tl.load(tables + (key >> bits) * 8) == 1:
                at = block * BLOCK_N + tl.arange(0, BLOCK_N)
                columns = tl.arange(0, BLOCK_D)
                is_entry = tl.load(key_N + at) == key
                gradient = _gradients(
                    pieces, order_N, place_N, weights_N, factor_V, at, is_entry, columns,
                    WEIGHTED, FACTORED, DIM, ALIGNED,
                )  # fmt: skip
                tl.store(partial + block * BLOCK_D + columns, tl.sum(gradient, 0))


@triton.jit
def _joined(flag, total, next_flag, next_total):
    """Combine two parts of a segmented sum: a flag starts a new segment."""
    return flag | next_flag, tl.where(next_flag != 0, next_total, total + next_total)


@triton.jit
def row_gradients(
    pieces, tables, key_N, order_N, place_N, weights_N, factor_V, partial, at, columns,
    num_entries, bits,
    WEIGHTED: tl.constexpr, FACTORED: tl.constexpr, DIM: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return for the sorted entries of a block [N]: whether each is the last of its row, the row's summed gradient
    [N, D] there, and keys. The order of sums does not depend on other programs."""
    is_entry = at < num_entries
    key = tl.load(key_N + at, mask=is_entry, other=0)
    mine = is_entry & (tl.load(tables + (key >> bits) * 8, mask=is_entry, other=0) == 1)
    gradient = _gradients(
        pieces, order_N, place_N, weights_N, factor_V, at, mine, columns, WEIGHTED, FACTORED, DIM, ALIGNED
    )
    previous = tl.load(key_N + at - 1, mask=is_entry & (at > 0), other=-1)
    following = tl.load(key_N + at + 1, mask=at + 1 < num_entries, other=-1)
    block = tl.program_id(0).to(tl.int64)
    begins = ((key != previous) | (at == block * BLOCK_N)).to(tl.int32)
    if BLOCK_N > 1:
        begins_ND = tl.broadcast_to(begins[:, None], [BLOCK_N, BLOCK_D])
        _, gradient = tl.associative_scan((begins_ND, gradient), 0, _joined)
    is_last = mine & (key != following)
    if block > 0:
        open_key = tl.load(key_N + block * BLOCK_N - 1)
        ends_here = is_last & (key == open_key)
        if tl.max(ends_here.to(tl.int32), 0) > 0:
            low = tl.zeros([], tl.int64)  # binary search: the start of the run
            high = block * BLOCK_N - 1
            while low < high:
                middle = (low + high) // 2
                is_before = tl.load(key_N + middle) < open_key
                low = tl.where(is_before, middle + 1, low)
                high = tl.where(is_before, high, middle)
            carried = tl.zeros([BLOCK_D], tl.float32)
            for start in range(low // BLOCK_N, block, 16):
                blocks = start + tl.arange(0, 16)
                held = partial + blocks[:, None] * BLOCK_D + columns[None, :]
                carried += tl.sum(tl.load(held, mask=(blocks < block)[:, None], other=0.0), 0)
            gradient += tl.where(ends_here[:, None], carried[None, :], 0.0)
    return is_last, gradient, key


@triton.jit
def square_rows(
    pieces, tables, key_N, order_N, place_N, weights_N, factor_V, partial, squares,
    num_entries, bits,
    WEIGHTED: tl.constexpr, FACTORED: tl.constexpr, DIM: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write Σ g² over the rows that end in each block."""
    at = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    is_last, gradient, _ = row_gradients(
        pieces, tables, key_N, order_N, place_N, weights_N, factor_V, partial, at, columns,
        num_entries, bits, WEIGHTED, FACTORED, DIM, ALIGNED, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    own = tl.where(is_last[:, None], gradient, 0.0).to(tl.float64)
    tl.store(squares + tl.program_id(0), tl.sum(tl.sum(own * own, 1), 0))


@triton.jit
def update_rows(
    pieces, tables, key_N, order_N, place_N, weights_N, factor_V, partial, like_rows, like_slots, scale,
    lr, decay, a, b, eps,
    num_entries, bits,
    WEIGHTED: tl.constexpr, FACTORED: tl.constexpr, DIM: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS_ALIGNED: tl.constexpr, COUNTS: tl.constexpr, KIND: tl.constexpr, SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Update the rows that end in each block, with their SLOTS numbers of slots.

    A row that would leave the range of its dtype stays unchanged.
    """
    row_type: tl.constexpr = like_rows.dtype.element_ty
    slot_type: tl.constexpr = like_slots.dtype.element_ty
    has_slot: tl.constexpr = SLOTS >= DIM and KIND != ROWWISE_ADAGRAD
    by_rows: tl.constexpr = (KIND == ROWWISE_ADAGRAD) | (KIND == ROWWISE_ADAM)
    has_second: tl.constexpr = (KIND == ADAM) | (KIND == ADAMW)
    at = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    is_last, gradient, key = row_gradients(
        pieces, tables, key_N, order_N, place_N, weights_N, factor_V, partial, at, columns,
        num_entries, bits, WEIGHTED, FACTORED, DIM, ALIGNED, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    gradient *= tl.load(scale)
    meta = tables + (key >> bits) * 8
    id = (key & ((tl.full([], 1, tl.int64) << bits) - 1)).to(tl.int64)
    is_value = is_last[:, None] & (columns < DIM)[None, :]
    row_bytes: tl.constexpr = DIM * row_type.primitive_bitwidth // 8
    slot_bytes: tl.constexpr = SLOTS * slot_type.primitive_bitwidth // 8
    rows_at = (tl.load(meta + 1, mask=is_last, other=0) + id * row_bytes).to(like_rows.dtype)
    slots_at = (tl.load(meta + 2, mask=is_last, other=0) + id * slot_bytes).to(like_slots.dtype)
    if ROWS_ALIGNED:
        rows_at = tl.multiple_of(rows_at, [16])
        slots_at = tl.multiple_of(slots_at, [16])
    rows = tl.load(rows_at[:, None] + columns[None, :], mask=is_value, other=0.0).to(tl.float32)
    number = id * 0 + 1
    drawn_by = id
    if (tl.float32 != row_type) | (tl.float32 != slot_type):
        ids_at = tl.load(meta + 6, mask=is_last, other=0)
        is_apart = is_last & (ids_at != 0)  # the row's number is not its id
        drawn_by = tl.where(is_apart, tl.load((ids_at + id * 8).to(pieces.dtype), mask=is_apart, other=0), id)
    if COUNTS:
        steps_at = (tl.load(meta + 3, mask=is_last, other=0) + id * 8).to(pieces.dtype)
        number = tl.load(steps_at, mask=is_last, other=0) + 1
    slot, second = rows, rows
    if has_slot:
        slot = tl.load(slots_at[:, None] + columns[None, :], mask=is_value, other=0.0).to(tl.float32)
    if has_second:
        second = tl.load(slots_at[:, None] + (DIM + columns)[None, :], mask=is_value, other=0.0).to(tl.float32)
    if by_rows:
        second = tl.load(slots_at + (SLOTS - 1), mask=is_last, other=0.0).to(tl.float32)
    nothing = tl.full([], 0.0, tl.float32)  # in the interpreter numbers are no tensors
    lr, a, b = lr + nothing, a + nothing, b + nothing
    rows, slot, second = step(rows, slot, second, gradient, number, lr, decay, a, b, eps, DIM, KIND)
    is_bad = tl.max((is_value & (fits(rows, row_type) == 0)).to(tl.int32), 1)
    if has_slot:
        is_bad = tl.maximum(is_bad, tl.max((is_value & (fits(slot, slot_type) == 0)).to(tl.int32), 1))
    if has_second:
        is_bad = tl.maximum(is_bad, tl.max((is_value & (fits(second, slot_type) == 0)).to(tl.int32), 1))
    if by_rows:
        is_bad = tl.maximum(is_bad, (fits(second, slot_type) == 0).to(tl.int32))
    is_good = is_last & (is_bad == 0)
    is_value = is_value & is_good[:, None]
    rounding_key = tl.load(meta + 5, mask=is_last, other=0)[:, None]
    drawn = 0
    if tl.float32 != row_type:
        drawn = draws(rounding_key, drawn_by, number, 0, ROW, BLOCK_D)
    tl.store(rows_at[:, None] + columns[None, :], rounded(rows, drawn, row_type), mask=is_value)
    if has_slot:
        if tl.float32 != slot_type:
            drawn = draws(rounding_key, drawn_by, number, 0, SLOT, BLOCK_D)
        tl.store(slots_at[:, None] + columns[None, :], rounded(slot, drawn, slot_type), mask=is_value)
    if has_second:
        if tl.float32 != slot_type:
            drawn = draws(rounding_key, drawn_by, number, DIM, SLOT, BLOCK_D)
        tl.store(slots_at[:, None] + (DIM + columns)[None, :], rounded(second, drawn, slot_type), mask=is_value)
    if by_rows:
        tl.store(slots_at + (SLOTS - 1), second, mask=is_good)
    if COUNTS:
        tl.store(steps_at, number, mask=is_good)
    is_refused = is_last & (is_bad != 0)
    refused_at = tl.load(meta + 4, mask=is_refused, other=0).to(pieces.dtype)
    tl.atomic_add(refused_at, tl.full([BLOCK_N], 1, tl.int64), mask=is_refused, sem="relaxed")
