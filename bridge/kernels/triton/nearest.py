"""Kernels for products of rows: a fast one, which keeps products above a row's threshold, and an exact one."""

from typing import Any

import torch
import triton
import triton.language as tl


def tiles(dtype: torch.dtype, dim: int) -> dict[str, Any]:
    """Return constants and options of :func:`nearest_hits`."""
    if dtype == torch.float32:
        shape = {"tile_m": 64, "tile_n": 64, "tile_k": 32, "piece": 32, "num_warps": 4, "num_stages": 3}
    else:
        shape = {"tile_m": 128, "tile_n": 256, "tile_k": 64, "piece": 16, "num_warps": 8, "num_stages": 3}
    return {**shape, "even": dim % shape["tile_k"] == 0}


EXACT: dict[str, Any] = {"candidates": 32, "num_warps": 2}
"""Constants and options of :func:`exact_scores`."""


@triton.jit
def nearest_hits(
    rows, others, thresholds, counts, hits, num_rows, num_others, own, first, width,
    dim: tl.constexpr, tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr, piece: tl.constexpr,
    even: tl.constexpr,
):  # fmt: skip
    """Append the keys of products above each row's threshold to hits [num_rows, width], and count them.

    Counts include keys for which ``width`` leaves no room.
    """
    tiles_n = tl.cdiv(num_others, tile_n)
    # Consecutive programs read the same rows and all others in turn, which the cache keeps for the next rows.
    m = (tl.program_id(0) // tiles_n) * tile_m + tl.arange(0, tile_m)
    n0 = (tl.program_id(0) % tiles_n) * tile_n
    n = n0 + tl.arange(0, tile_n)
    # Indices outside are clamped for reading, and masked below.
    a = rows + tl.minimum(m, num_rows - 1).to(tl.int64)[:, None] * dim
    b = others + tl.minimum(n, num_others - 1).to(tl.int64)[None, :] * dim
    scores = tl.zeros((tile_m, tile_n), tl.float32)
    for k in range(0, dim, tile_k):
        at = k + tl.arange(0, tile_k)
        if even:
            x, y = tl.load(a + at[None, :]), tl.load(b + at[:, None])
        else:
            x = tl.load(a + at[None, :], mask=(at < dim)[None, :], other=0.0)
            y = tl.load(b + at[:, None], mask=(at < dim)[:, None], other=0.0)
        scores = tl.dot(x, y, scores, input_precision="ieee")
    threshold = tl.load(thresholds + m, mask=m < num_rows, other=float("inf"))
    # Few tiles hold hits, and in few columns: only those pieces are searched.
    pieces = scores.reshape(tile_m, tile_n // piece, piece)
    number = tl.arange(0, tile_n // piece)
    found = tl.max((tl.max(pieces, 2) > threshold[:, None]).to(tl.int32), 0)
    word = tl.sum(found << number, 0)
    for i in range(tile_n // piece):
        if (word >> i) & 1 == 1:
            some = tl.sum(tl.where((number == i)[None, :, None], pieces, 0.0), 1)
            at = n0 + i * piece + tl.arange(0, piece)
            hit = (
                (some > threshold[:, None]) & (at < num_others)[None, :] & ((first + at)[None, :] != (own + m)[:, None])
            )
            places = tl.atomic_add(counts + m[:, None] + tl.zeros((tile_m, piece), tl.int32), 1, hit, sem="relaxed")
            bits = (some + 0.0).to(tl.int32, bitcast=True)
            ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
            keys = (ordered << 32) | (0x7FFFFFFF - (first + at)).to(tl.int64)[None, :]
            tl.store(hits + m[:, None].to(tl.int64) * width + places, keys, hit & (places < width))


@triton.jit
def exact_scores(
    rows, ids, counts, others, scores, width, first, num_others, dim: tl.constexpr, candidates: tl.constexpr
):
    """Write float64 scores of a row with those of its candidates that are among the others; other scores stay.

    Column d adds to partial sum d mod 16, and these are added in pairs, as in ``neighbour_exact.cpp``.
    """
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counts + row)
    lane = tl.arange(0, 16)
    for start in range(0, count, candidates):
        j = start + tl.arange(0, candidates)
        at = tl.load(ids + row * width + j, mask=j < count, other=0) - first
        here = (j < count) & (at >= 0) & (at < num_others)
        if tl.max(here.to(tl.int32), 0) > 0:
            other = others + at.to(tl.int64)[:, None] * dim
            sums = tl.zeros((candidates, 16), tl.float64)
            for d in range(0, dim, 64):
                for i in tl.static_range(4):
                    column = d + i * 16 + lane
                    x = tl.load(rows + row * dim + column, mask=column < dim, other=0.0).to(tl.float64)
                    y = tl.load(other + column[None, :], mask=here[:, None] & (column < dim)[None, :], other=0.0)
                    sums += x[None, :] * y.to(tl.float64)
            sums = tl.sum(sums.reshape(candidates, 2, 8), 1)
            sums = tl.sum(sums.reshape(candidates, 2, 4), 1)
            sums = tl.sum(sums.reshape(candidates, 2, 2), 1)
            tl.store(scores + row * width + j, tl.sum(sums, 1), mask=here)
