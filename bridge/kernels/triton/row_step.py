"""Functions on rows in registers: an optimizer's step, and stochastic rounding to the stored dtype.

Tiles are [N, C] float32: N rows and C of their columns, from a multiple of 8 on. Compiled without fused multiply-adds
(``enable_fp_fusion=False``), steps without powers give the bits of a shard.
"""

import triton
import triton.language as tl

SGD = tl.constexpr(0)
MOMENTUM = tl.constexpr(1)
NESTEROV = tl.constexpr(2)
ADAGRAD = tl.constexpr(3)
ADAM = tl.constexpr(4)
ADAMW = tl.constexpr(5)
ROWWISE_ADAGRAD = tl.constexpr(6)
ROWWISE_ADAM = tl.constexpr(7)
"""Optimizer kinds, by the names of ``StepNumbers.kind`` in ``bridge/kernels/optimizers.py``."""

ROW = tl.constexpr(0)
SLOT = tl.constexpr(1)
"""Part of a row that is rounded."""

_ROUNDS = tl.constexpr(7)


@triton.jit
def step(row, slot, second, gradient, t, lr, decay, a, b, eps, dim, KIND: tl.constexpr):
    """Make one update and return row, slot and second slot. Operands that the kind does not use are returned unchanged.

    row, slot, gradient: [N, C]; second: [N, C], of a kind by rows [N]; t: [N] int64, number of each row's update.
    Kinds by rows want all columns of a row in the tile, and zero gradients beyond ``dim``. decay, a, b, eps:
    ``step_numbers`` of ``bridge/kernels/optimizers.py``.
    """
    if KIND == SGD:
        row = row - lr * (gradient + decay * row)
    elif KIND == MOMENTUM:
        slot = a * slot + (gradient + decay * row)
        row = row - lr * slot
    elif KIND == NESTEROV:
        direction = gradient + decay * row
        slot = a * slot + direction
        row = row - lr * (direction + a * slot)
    elif KIND == ADAGRAD or KIND == ROWWISE_ADAGRAD:  # noqa: SIM109
        direction = gradient + decay * row
        size = (tl.full(t.shape, lr, tl.float64) / (1 + (t - 1).to(tl.float64) * a)).to(tl.float32)[:, None]
        if KIND == ADAGRAD:
            slot = slot + direction * direction
            row = row - size * tl.div_rn(direction, tl.sqrt_rn(b + slot) + eps)
        else:
            second = second + _mean_square(direction, dim)
            inverse = tl.div_rn(tl.full(second.shape, 1.0, tl.float32), tl.sqrt_rn(b + second) + eps)
            row = row - size * (direction * inverse[:, None])
    else:
        beta1, rest1, correction1 = _moment(a, t)
        beta2, rest2, correction2 = _moment(b, t)
        size = (tl.full(t.shape, lr, tl.float64) / correction1).to(tl.float32)[:, None]
        inverse_root = (1.0 / tl.sqrt(correction2)).to(tl.float32)
        direction = gradient
        if KIND == ADAM:
            direction = gradient + decay * row
        else:
            row = row * (1 - lr * decay)
        slot = beta1[:, None] * slot + rest1[:, None] * direction
        if KIND == ROWWISE_ADAM:
            second = beta2 * second + rest2 * _mean_square(direction, dim)
            divisor = tl.sqrt_rn(second) * inverse_root + eps
            inverse = tl.div_rn(tl.full(second.shape, 1.0, tl.float32), divisor)
            row = row - size * (slot * inverse[:, None])
        else:
            second = beta2[:, None] * second + rest2[:, None] * direction * direction
            row = row - size * tl.div_rn(slot, tl.sqrt_rn(second) * inverse_root[:, None] + eps)
    return row, slot, second


@triton.jit
def _moment(log_beta, t):
    """Return beta, 1 − beta (float32) and 1 − beta^t (float64), [N], from the logarithm of beta."""
    log = tl.full(t.shape, log_beta, tl.float64)
    beta = tl.exp(log)
    return beta.to(tl.float32), (1 - beta).to(tl.float32), 1 - tl.exp(t.to(tl.float64) * log)


@triton.jit
def _mean_square(direction, dim):
    return tl.sum(direction * direction, axis=1) / dim


@triton.jit
def draws(key, id, number, column, PART: tl.constexpr, C: tl.constexpr):
    """Return 16 random bits for each of C columns from ``column`` on, both multiples of 8; int32 [N, C].

    The bits of ``bridge/kernels/rounding.py``. key: 64 bits; id, number: [N] int64.
    """
    block = column // 8 + tl.arange(0, C // 8) + (PART << 16)
    zero = tl.zeros([id.shape[0], C // 8], tl.uint32)
    c0 = zero + (id & 0xFFFFFFFF).to(tl.uint32)[:, None]
    c1 = zero + ((id >> 32) & 0xFFFFFFFF).to(tl.uint32)[:, None]
    c2 = zero + (number & 0xFFFFFFFF).to(tl.uint32)[:, None]
    c3 = zero + block.to(tl.uint32)[None, :]
    w0, w1, w2, w3 = tl.philox(key, c0, c1, c2, c3, _ROUNDS)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))  # [N, C / 8, 2, 2]: word 2i + j
    halves = tl.join(words & 0xFFFF, words >> 16)
    return tl.reshape(halves, [id.shape[0], C]).to(tl.int32)


@triton.jit
def rounded(value, drawn, dtype: tl.constexpr):
    """Return ``value`` (float32) as ``dtype``: 16 bits stochastically, float32 unchanged. It must pass ``fits``."""
    if dtype == tl.float32:
        stored = value
    else:
        bits = value.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        if dtype == tl.bfloat16:
            away = tl.minimum((magnitude + drawn) >> 16, 0x7F7F)
        else:
            small = magnitude < 0x38800000
            subnormal = (tl.where(small, tl.abs(value), 0.0) * 1099511627776.0).to(tl.int32)  # 2^40
            normal = (magnitude - 0x38000000 + (drawn >> 3)) >> 13
            away = tl.minimum(tl.where(small, (subnormal + drawn) >> 16, normal), 0x7BFF)
        code = (away | ((bits >> 16) & 0x8000)).to(tl.int16)
        stored = code.to(dtype, bitcast=True)
    return stored


@triton.jit
def fits(value, dtype: tl.constexpr):
    """Return where ``value`` (float32) stays finite in ``dtype``; for 8 bits with a scale: up to 2^126."""
    magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if dtype == tl.float32:
        limit = 0x7F800000
    elif dtype == tl.float16:
        limit = 0x477FF000
    elif dtype == tl.uint8 or dtype == tl.int8:
        limit = 0x7E800001
    else:
        limit = 0x7F7F8000
    return magnitude < limit


@triton.jit
def widened(code, dtype: tl.constexpr):
    """Return a code as float32, before its scale: float8_e4m3fn, held in uint8, or int8."""
    if dtype == tl.uint8:
        bits = ((code & 0x7F).to(tl.int16) << 7).to(tl.float16, bitcast=True)  # the exponent of float16 is 8 more
        size = bits.to(tl.float32) * 256.0
        value = tl.where(code >= 0x80, -size, size)
    else:
        value = code.to(tl.float32)
    return value


@triton.jit
def scale_of(largest, dtype: tl.constexpr):
    """Return the power-of-two scale for values of up to ``largest``, as in ``bridge/kernels/scaled.py``."""
    if dtype == tl.uint8:
        ratio = tl.div_rn(largest, tl.full(largest.shape, 448.0, tl.float32))
    else:
        ratio = tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32))
    bits = (ratio.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return tl.minimum(tl.maximum(bits, 0x0D800000), 0x7E800000).to(tl.float32, bitcast=True)


@triton.jit
def inverse_of(scale):
    """Return 1 / a scale, exactly."""
    return (0x7F000000 - scale.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def narrowed(value, drawn, dtype: tl.constexpr):
    """Return stochastically rounded codes of a value that is already divided by its scale."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    size = tl.abs(value)
    if dtype == tl.uint8:
        is_small = magnitude < 0x3C800000
        small = ((tl.where(is_small, size, 0.0) * 33554432.0).to(tl.int32) + drawn) >> 16
        away = tl.minimum(tl.where(is_small, small, (magnitude - 0x3C000000 + (drawn << 4)) >> 20), 0x7E)
        code = (away | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        away = tl.minimum(((size * 65536.0).to(tl.int32) + drawn) >> 16, 127)
        code = tl.where(value < 0, -away, away).to(tl.int8)
    return code


@triton.jit
def stored(value, key, id, number, column, PART: tl.constexpr, C: tl.constexpr, dtype: tl.constexpr):
    """Return ``value`` as ``dtype``, rounded stochastically; 8 bits: already scaled. Columns as in ``draws``."""
    if dtype == tl.float32:
        made = value
    elif dtype == tl.uint8 or dtype == tl.int8:
        made = narrowed(value, draws(key, id, number, column, PART, C), dtype)
    else:
        made = rounded(value, draws(key, id, number, column, PART, C), dtype)
    return made
