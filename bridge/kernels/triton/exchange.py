"""Kernels of :mod:`geartrain.bridge.kernels.exchange`. A key is a table and an id in it: table << bits | id."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_ranks(
    numbers, key_N, place_N, rank_N, has_RV,
    num_ids, num_tables, num_vectors, num_ranks, bits, none,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write each id's rank (num_ranks if the id counts for nothing), and flag each pair of vector and rank."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_id = at < num_ids
    key = tl.load(key_N + at, mask=is_id, other=none).to(tl.int64)
    place = tl.load(place_N + at, mask=is_id, other=0)
    first = numbers + num_tables + (place >> 40)
    vector = tl.load(first, mask=is_id, other=0) + (place & ((1 << 40) - 1))
    counts = is_id & (key < none)
    counts &= vector < tl.load(first + 1, mask=is_id, other=0)
    share = tl.load(numbers + (key >> bits), mask=counts, other=1)
    id_mask = (tl.full([], 1, tl.int64) << bits) - 1
    rank = tl.where(counts, (key & id_mask) // share, num_ranks)
    tl.store(rank_N + at, rank.to(rank_N.dtype.element_ty), mask=is_id)
    tl.store(has_RV + 1 + rank * num_vectors + vector, 1, mask=counts)


@triton.jit
def _part(rank_N, order_N, place_N, at, is_id, num_fields, num_parts):
    """Return the part (rank and field, as one number), order and place of sorted ids."""
    entry = tl.load(order_N + at, mask=is_id, other=0)
    rank = tl.load(rank_N + at, mask=is_id, other=0).to(tl.int64)
    place = tl.load(place_N + entry, mask=is_id, other=0)
    return tl.minimum(rank * num_fields + (place >> 40), num_parts), entry, rank, place


@triton.jit
def pack_ids(
    numbers, rank_N, order_N, key_N, place_N, weights_N, pairs_RV, words, starts_Q,
    num_ids, num_tables, num_fields, num_vectors, num_ranks,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write two words for each id, in the order of ranks, and the start of each rank and field's ids and pairs."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_id = at < num_ids
    first_vectors = numbers + num_tables
    num_parts = tl.full([], 1, tl.int64) * num_ranks * num_fields
    part, entry, rank, place = _part(rank_N, order_N, place_N, at, is_id, num_fields, num_parts)
    travels = is_id & (rank < num_ranks)
    key = tl.load(key_N + entry, mask=is_id, other=0).to(tl.int64)
    vector = tl.load(first_vectors + (place >> 40), mask=travels, other=0) + (place & ((1 << 40) - 1))
    pair = tl.load(pairs_RV + 1 + rank * num_vectors + vector, mask=travels, other=1) - 1
    weight = tl.full([BLOCK], 1.0, tl.float32)
    if WEIGHTED:
        weight = tl.load(weights_N + entry, mask=is_id, other=0.0)
    second = (weight.to(tl.int32, bitcast=True).to(tl.int64) << 32) | pair.to(tl.int64)
    tl.store(words + at * 2, key, mask=is_id)
    tl.store(words + at * 2 + 1, second, mask=is_id)
    # After the last id, all remaining parts begin.
    part = tl.where(is_id, part, num_parts)
    before, _, _, _ = _part(rank_N, order_N, place_N, at - 1, (at > 0) & (at <= num_ids), num_fields, num_parts)
    before = tl.where(at == 0, -1, tl.where(at <= num_ids, before, num_parts))
    for turn in range(tl.max(part - before, 0)):
        here = before + 1 + turn
        begins = here <= part
        of_rank = here // num_fields
        vector = of_rank * num_vectors + tl.load(first_vectors + here - of_rank * num_fields, mask=begins, other=0)
        tl.store(starts_Q + here, at, mask=begins)
        pair = tl.load(pairs_RV + vector, mask=begins, other=0)
        tl.store(starts_Q + num_parts + 1 + here, pair.to(tl.int64), mask=begins)


@triton.jit
def group_ids(
    numbers, words, key_N, place_N, bounds_V, weights_N,
    num_ids, num_pieces, num_vectors,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write keys and weights of arrived ids, the vector that each counts in, and the start of each vector's ids."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_id = at < num_ids
    low = tl.zeros_like(at)  # binary search: the last piece that begins at or before the id
    high = low + num_pieces
    left = tl.full([], 0, tl.int64) + num_pieces
    while left > 0:
        middle = (low + high) // 2
        begins = tl.load(numbers + middle, mask=is_id & (middle < high), other=0)
        is_before = (begins <= at) & (low < high)
        low = tl.where(is_before, middle + 1, low)
        high = tl.where(is_before, high, middle)
        left = left // 2
    piece = tl.maximum(low - 1, 0)
    first = tl.load(numbers + num_pieces + 1 + piece, mask=is_id, other=0)
    shift = tl.load(numbers + 2 * num_pieces + 2 + piece, mask=is_id, other=0)
    second = tl.load(words + at * 2 + 1, mask=is_id, other=0)
    pair = second & 0xFFFFFFFF
    vector = pair - shift
    tl.store(key_N + at, tl.load(words + at * 2, mask=is_id, other=0).to(key_N.dtype.element_ty), mask=is_id)
    tl.store(place_N + at, (piece << 40) | (vector - first), mask=is_id)
    if WEIGHTED:
        tl.store(weights_N + at, (second >> 32).to(tl.int32).to(tl.float32, bitcast=True), mask=is_id)
    before = tl.load(words + at * 2 - 1, mask=is_id & (at > 0), other=0) & 0xFFFFFFFF
    begins = (at == tl.load(numbers + piece, mask=is_id, other=0)) | (before != pair)
    tl.store(bounds_V + vector, at, mask=is_id & begins)
    tl.store(bounds_V + num_vectors + at * 0, at, mask=at == num_ids)


@triton.jit
def _numbers_of(fields, num_ranks, BLOCK: tl.constexpr):
    """Return a field's numbers, and the vector and column of each element of this program."""
    meta = fields + tl.program_id(1).to(tl.int64) * (num_ranks + 6)
    dim = tl.load(meta + 2)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    first = start // dim
    narrow = dim.to(tl.int32)
    local = (start - first * dim).to(tl.int32) + tl.arange(0, BLOCK)
    vector = first + local // narrow
    column = local % narrow
    return meta, dim, vector, column, vector < tl.load(meta), tl.load(meta + 1) + vector


@triton.jit
def combine_pairs(
    fields, flat, pairs_RV, factor_V, num_vectors, num_ranks,
    FACTORED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[v] = factor · Σ of the ranks' sums, in rank order."""
    meta, dim, vector, column, is_value, place = _numbers_of(fields, num_ranks, BLOCK)
    out = tl.load(meta + 3).to(flat.dtype)
    total = tl.zeros([BLOCK], tl.float32)
    pairs = pairs_RV + place
    for rank in range(num_ranks):
        pair = tl.load(pairs, mask=is_value, other=0)
        has = is_value & (tl.load(pairs + 1, mask=is_value, other=0) > pair)
        shift = tl.load(meta + 6 + rank)
        total += tl.load(flat + shift + pair.to(tl.int64) * dim + column, mask=has, other=0.0)
        pairs += num_vectors
    if FACTORED:
        total *= tl.load(factor_V + place, mask=is_value, other=0.0)
    tl.store(out + vector * dim + column, total, mask=is_value)


@triton.jit
def spread_pairs(
    fields, flat, pairs_RV, factor_V, num_vectors, num_ranks,
    FACTORED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write factor · gradient of each vector for every rank that has rows of it, and a flag for each field."""
    meta, dim, vector, column, is_value, place = _numbers_of(fields, num_ranks, BLOCK)
    gradients = tl.load(meta + 3).to(flat.dtype)
    stride = tl.load(meta + 4)
    is_used = tl.load(meta + 5)
    gradient = tl.load(gradients + vector * stride + column, mask=is_value & (is_used != 0), other=0.0)
    if FACTORED:
        gradient *= tl.load(factor_V + place, mask=is_value, other=0.0)
    pairs = pairs_RV + place
    for rank in range(num_ranks):
        pair = tl.load(pairs, mask=is_value, other=0)
        has = is_value & (tl.load(pairs + 1, mask=is_value, other=0) > pair)
        shift = tl.load(meta + 6 + rank)
        tl.store(flat + shift + pair.to(tl.int64) * dim + column, gradient, mask=has)
        pairs += num_vectors
    if tl.program_id(0) == 0:
        field = tl.program_id(1)
        num_fields = tl.num_programs(1)
        starts = fields + num_fields.to(tl.int64) * (num_ranks + 6)
        padded = (num_fields + 3) // 4 * 4
        for rank in range(num_ranks):
            flags = flat + tl.load(starts + rank)
            tl.store(flags + field, is_used.to(tl.float32))
            if field == num_fields - 1:
                nothing = tl.arange(0, 4) + num_fields
                tl.store(flags + nothing, 0.0, mask=nothing < padded)
