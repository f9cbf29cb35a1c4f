"""The values of rows that nobody wrote. Compiled without fused multiply-adds, so that they have the bits of a shard."""

from __future__ import annotations

import triton
import triton.language as tl

from geartrain.bridge.kernels import philox as reference
from geartrain.bridge.kernels.triton.row_step import rounded

_CENTRAL_TOP = tl.constexpr(reference.CENTRAL_TOP)
_CENTRAL_BOTTOM = tl.constexpr(reference.CENTRAL_BOTTOM)
_TAIL_TOP = tl.constexpr(reference.TAIL_TOP)
_TAIL_BOTTOM = tl.constexpr(reference.TAIL_BOTTOM)
_LOG_SERIES = tl.constexpr(reference.LOG_SERIES)
_SQRT_HALF_BITS = tl.constexpr(reference.SQRT_HALF_BITS)


def tile(dim: int) -> dict[str, int]:
    """Return tile sizes of :func:`write_rows` for rows of ``dim``: a grid over rows and columns."""
    width = min(512, max(16, triton.next_power_of_2(dim)))
    return {"N": 1024 // width, "C": width, "num_warps": 8}


@triton.jit
def write_rows(
    rows,  # [L, D]
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
    zero = tl.zeros([N], tl.int64)
    low, high = (zero + low_bits).to(tl.float64, bitcast=True), (zero + high_bits).to(tl.float64, bitcast=True)
    value = _values(first + place, start, low, high, zero.to(tl.float32) + below, seed, zero + table_hash, IS_NORMAL, C)
    mask = (place < num)[:, None] & (column < D)[None, :]
    _store(rows + place[:, None] * D + column[None, :], value, mask)


@triton.jit
def write_new_rows(
    tables,  # of each 8 numbers: address of rows, 0: not meant; what write_rows takes of it
    like,  # a pointer to numbers of their type
    key_N,  # int64, table << bits | …
    ids_N,
    numbers_N,  # int64, of rows; -1: not to be written
    num,
    bits,
    seed,
    D: tl.constexpr,
    IS_NORMAL: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    number = tl.load(numbers_N + place, mask=place < num, other=-1)
    if tl.max(number) >= 0:
        start = tl.program_id(1) * C
        column = start + tl.arange(0, C)
        is_new = number >= 0
        meta = tables + (tl.load(key_N + place, mask=is_new, other=0) >> bits) * 8
        rows = tl.load(meta, mask=is_new, other=0)
        is_new &= rows != 0
        low = tl.load(meta + 1, mask=is_new, other=0).to(tl.float64, bitcast=True)
        high = tl.load(meta + 2, mask=is_new, other=0).to(tl.float64, bitcast=True)
        below = tl.load(meta + 3, mask=is_new, other=0).to(tl.int32).to(tl.float32, bitcast=True)
        table_hash = tl.load(meta + 4, mask=is_new, other=0)
        id = tl.load(ids_N + place, mask=is_new, other=0)
        value = _values(id, start, low, high, below, seed, table_hash, IS_NORMAL, C)
        mask = is_new[:, None] & (column < D)[None, :]
        _store(rows.to(like.dtype)[:, None] + number[:, None] * D + column[None, :], value, mask)


@triton.jit
def _values(id, start, low, high, below, seed, table_hash, IS_NORMAL: tl.constexpr, C: tl.constexpr):
    """float32 [N, C], from column ``start`` on."""
    zero = tl.zeros([id.shape[0], C // 4], tl.uint32)
    c0 = zero + (id & 0xFFFFFFFF).to(tl.uint32)[:, None]
    c1 = zero + ((id >> 32) & 0xFFFFFFFF).to(tl.uint32)[:, None]
    c2 = zero + (start // 4 + tl.arange(0, C // 4)).to(tl.uint32)[None, :]
    c3 = zero + table_hash.to(tl.uint32)[:, None]
    w0, w1, w2, w3 = tl.philox(seed, c0, c1, c2, c3, 10)
    word = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [id.shape[0], C]).to(tl.float64)
    if IS_NORMAL:
        q = (word + 0.5) * 2.3283064365386963e-10 - 0.5
        value = (low[:, None] + high[:, None] * _inverse_normal(q)).to(tl.float32)
    else:
        value = (low[:, None] + (high - low)[:, None] * (word * 2.3283064365386963e-10)).to(tl.float32)
        value = tl.where(value.to(tl.float64) >= high[:, None], below[:, None], value)
    return value


@triton.jit
def _store(at, value, mask):
    if at.dtype.element_ty == tl.bfloat16:  # to the nearest, ties to even; the interpreter's conversion cuts off
        tie = (value.to(tl.int32, bitcast=True) >> 16) & 1
        tl.store(at, rounded(value, 0x7FFF + tie, tl.bfloat16), mask=mask)
    else:
        tl.store(at, value.to(at.dtype.element_ty), mask=mask)


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
