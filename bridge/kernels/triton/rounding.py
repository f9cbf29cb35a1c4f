"""Kernel that rounds rows stochastically to 16 bits, each row under its own key: for rows of several tables."""

from __future__ import annotations

import triton
import triton.language as tl

from geartrain.bridge.kernels.triton.row_step import draws, fits, rounded


def tile(dim: int) -> dict[str, int]:
    """Return tile sizes of :func:`round_rows` for rows of ``dim``: a grid over rows and columns."""
    width = min(512, max(16, triton.next_power_of_2(dim)))
    return {"N": 1024 // width, "C": width, "num_warps": 4}


@triton.jit
def round_rows(
    values,  # [N, D] float32
    out,  # [N, D]
    ids,  # [N] int64
    numbers,  # [N] int64
    keys,  # [N] int64
    num,
    D: tl.constexpr,
    PART: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    start = tl.program_id(1) * C
    column = start + tl.arange(0, C)
    is_here = place < num
    mask = is_here[:, None] & (column < D)[None, :]
    id, number = tl.load(ids + place, mask=is_here, other=0), tl.load(numbers + place, mask=is_here, other=0)
    key = tl.load(keys + place, mask=is_here, other=0)
    at = place[:, None] * D + column[None, :]
    value = tl.load(values + at, mask=mask, other=0.0)
    dtype: tl.constexpr = out.dtype.element_ty
    stored = rounded(value, draws(key[:, None], id, number, start, PART, C), dtype)
    tl.store(out + at, tl.where(fits(value, dtype), stored, value.to(dtype)), mask=mask)
