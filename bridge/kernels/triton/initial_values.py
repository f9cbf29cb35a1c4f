"""The values of rows that nobody wrote. Compiled without fused multiply-adds, so that they have the bits of a shard."""

from __future__ import annotations

import triton
import triton.language as tl

from geartrain.bridge.kernels import initial_values as reference
from geartrain.bridge.kernels.triton.row_step import rounded

_CENTRAL_TOP = tl.constexpr(reference.CENTRAL_TOP)
_CENTRAL_BOTTOM = tl.constexpr(reference.CENTRAL_BOTTOM)
_TAIL_TOP = tl.constexpr(reference.TAIL_TOP)
_TAIL_BOTTOM = tl.constexpr(reference.TAIL_BOTTOM)
_LOG_SERIES = tl.constexpr(reference.LOG_SERIES)
_SQRT_HALF_BITS = tl.constexpr(reference.SQRT_HALF_BITS)


def tile(dim: int) -> dict[str, int]:
    """How :func:`write_rows` is started for rows of ``dim``: a grid over rows and columns."""
    width = min(512, max(16, triton.next_power_of_2(dim)))
    return {"N": 1024 // width, "C": width, "num_warps": 8}


@triton.jit
def write_rows(
    rows,  # [L, D]
    ids,  # int64 [N], None: first …
    numbers,  # int64 [N], of their rows; -1: not to be written; None: 0 …
    low_bits,  # of float64: of low and high, or mean and standard deviation
    high_bits,
    below,  # the largest float32 of the interval
    num,
    first,  # id of row 0
    seed,
    table_hash,
    D: tl.constexpr,
    IS_NORMAL: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    start = tl.program_id(1) * C
    column = start + tl.arange(0, C)
    number = place
    is_meant = place < num
    if numbers is not None:
        number = tl.load(numbers + place, mask=is_meant, other=-1)
        is_meant = number >= 0
        if tl.max(number) < 0:
            return
    if ids is None:  # noqa: SIM108 (no tensor is a constant)
        id = first + place
    else:
        id = tl.load(ids + place, mask=is_meant, other=0)
    zero = tl.zeros([N, C // 4], tl.uint32)
    c0 = zero + (id & 0xFFFFFFFF).to(tl.uint32)[:, None]
    c1 = zero + ((id >> 32) & 0xFFFFFFFF).to(tl.uint32)[:, None]
    c2 = zero + (start // 4 + tl.arange(0, C // 4)).to(tl.uint32)[None, :]
    c3 = zero + tl.full([1, 1], table_hash, tl.int64).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, c3, 10)
    word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [N, C]).to(tl.float64)
    low = tl.full([1, 1], low_bits, tl.int64).to(tl.float64, bitcast=True)
    high = tl.full([1, 1], high_bits, tl.int64).to(tl.float64, bitcast=True)
    if IS_NORMAL:
        q = (word + 0.5) * 2.3283064365386963e-10 - 0.5
        value = (low + high * _inverse_normal(q)).to(tl.float32)
    else:
        value = (low + (high - low) * (word * 2.3283064365386963e-10)).to(tl.float32)
        value = tl.where(value.to(tl.float64) >= high, below, value)
    mask = is_meant[:, None] & (column < D)[None, :]
    rows += number[:, None] * D + column[None, :]
    if rows.dtype.element_ty == tl.bfloat16:  # to the nearest, ties to even; the interpreter's conversion cuts off
        tie = (value.to(tl.int32, bitcast=True) >> 16) & 1
        tl.store(rows, rounded(value, 0x7FFF + tie, tl.bfloat16), mask=mask)
    else:
        tl.store(rows, value.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def _inverse_normal(q):
    size = tl.abs(q)
    central = tl.full(q.shape, 0.180625, tl.float64) - q * q
    middle = q * _polynomial(_CENTRAL_TOP, central, 8) / _polynomial(_CENTRAL_BOTTOM, central, 8)
    r = tl.sqrt(-_log(0.5 - size)) - tl.full(q.shape, 1.6, tl.float64)
    tail = _polynomial(_TAIL_TOP, r, 8) / _polynomial(_TAIL_BOTTOM, r, 8)
    return tl.where(size > tl.full(q.shape, 0.425, tl.float64), tl.where(q < 0, -tail, tail), middle)


@triton.jit
def _log(x):
    bits = x.to(tl.int64, bitcast=True)
    e = (bits - _SQRT_HALF_BITS) >> 52
    m = (bits - (e << 52)).to(tl.float64, bitcast=True)
    s = (m - 1.0) / (m + 1.0)
    return e.to(tl.float64) * tl.full(x.shape, 0.6931471805599453, tl.float64) + 2.0 * s * _polynomial(
        _LOG_SERIES, s * s, 11
    )


@triton.jit
def _polynomial(coefficients: tl.constexpr, x, NUM: tl.constexpr):
    value = tl.full(x.shape, coefficients[NUM - 1], tl.float64)
    for i in tl.static_range(NUM - 1):
        value = value * x + tl.full(x.shape, coefficients[NUM - 2 - i], tl.float64)
    return value
