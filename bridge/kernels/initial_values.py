"""The values of rows that nobody wrote, made where they are: those of ``csrc/values/initial_values.hpp``, bit by bit.

Philox4x32-10 of (id, column / 4, hash of the table's name) under the seed, uniform or through the inverse of the
normal distribution from + − · / and a root alone: Wichura's AS 241 (PPND16) with a logarithm of our own.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from geartrain.bridge.kernels.launch import Cost, launch, runs_kernels
from geartrain.bridge.kernels.philox import WORD, philox_words

CONSTANT, UNIFORM, NORMAL = range(3)
_ROUNDS = 10
_BLOCK_NUMBERS = 1 << 20
CENTRAL_TOP = (
    *(3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3, 1.3731693765509461125e4),
    *(4.5921953931549871457e4, 6.7265770927008700853e4, 3.3430575583588128105e4, 2.5090809287301226727e3),
)
CENTRAL_BOTTOM = (
    *(1.0, 4.2313330701600911252e1, 6.8718700749205790830e2, 5.3941960214247511077e3),
    *(2.1213794301586595867e4, 3.9307895800092710610e4, 2.8729085735721942674e4, 5.2264952788528545610e3),
)
TAIL_TOP = (
    *(1.42343711074968357734e0, 4.63033784615654529590e0, 5.76949722146069140550e0, 3.64784832476320460504e0),
    *(1.27045825245236838258e0, 2.41780725177450611770e-1, 2.27238449892691845833e-2, 7.74545014278341407640e-4),
)
TAIL_BOTTOM = (
    *(1.0, 2.05319162663775882187e0, 1.67638483018380384940e0, 6.89767334985100004550e-1),
    *(1.48103976427480074590e-1, 1.51986665636164571966e-2, 5.47593808499534494600e-4, 1.05075007164441684324e-9),
)
LOG_SERIES = tuple(1.0 / odd for odd in range(1, 22, 2))
SQRT_HALF_BITS = 0x3FE6A09E667F3BCD


def write_initial_values(
    rows_LD: Tensor,
    first_id: int,
    *,
    distribution: int,
    first: float,
    second: float,
    seed: int,
    table_hash: int,
    ids_N: Tensor | None = None,
    numbers_N: Tensor | None = None,
) -> None:
    """Write the first values of rows, of all in the order of their ids or of some, rounded to the nearest of their
    storage type.

    Args:
        rows_LD: float32, bfloat16 or float16, contiguous; overwritten.
        first_id: Of row 0, where all are written.
        distribution: CONSTANT (``first``), UNIFORM on [first, second) or NORMAL (mean and standard deviation).
        first: See there.
        second: See there.
        seed: The table's, 64 bits.
        table_hash: Of its name, 32 bits.
        ids_N: Of the rows to be written, int64; None: all from ``first_id`` on.
        numbers_N: Their numbers, int64; -1: not to be written. A row may occur again, with the same id.

    One kernel, or tensor operations on blocks of 8 MiB.
    """
    if distribution == CONSTANT and ids_N is None:
        rows_LD.fill_(first)
        return
    if distribution == CONSTANT:
        distribution = NORMAL  # without deviation
    num, dim = len(rows_LD) if ids_N is None else len(ids_N), rows_LD.shape[1]
    below = _largest_below(second, first)
    if runs_kernels(rows_LD.device):
        from geartrain.bridge.kernels.triton.initial_values import tile, write_rows

        options = tile(dim)
        launch(
            write_rows,
            (-(-num // options["N"]), -(-dim // options["C"])),
            rows_LD,
            ids_N,
            numbers_N,
            *struct.unpack("qq", struct.pack("dd", first, second)),  # a kernel takes numbers as float32
            below,
            num,
            first_id,
            seed,
            table_hash,
            cost=Cost(rows_LD.nbytes if ids_N is None else 16 * num),  # as if none were new, as most are not in a step
            D=dim,
            IS_NORMAL=distribution == NORMAL,
            enable_fp_fusion=False,
            **options,
        )
        return
    block = max(1, _BLOCK_NUMBERS // dim)
    columns = torch.arange(-(-dim // 4), device=rows_LD.device)
    hash_word = torch.full((), table_hash, device=rows_LD.device)
    rows_N = torch.arange(num, device=rows_LD.device)
    if ids_N is None:
        ids_N = rows_N + first_id
    elif numbers_N is not None:
        is_meant_N = numbers_N >= 0
        ids_N, rows_N = ids_N[is_meant_N], numbers_N[is_meant_N]
    for start in range(0, len(ids_N), block):
        ids_B = ids_N[start : start + block]
        low, high = (ids_B & WORD).unsqueeze(1), (ids_B >> 32).unsqueeze(1)
        words = philox_words(seed, (low, high, columns.unsqueeze(0), hash_word), _ROUNDS)
        words_ND = words.reshape(len(ids_B), -1)[:, :dim].double()
        if distribution == NORMAL:
            values_ND = (inverse_normal(words_ND) * second + first).float()
        else:
            values_ND = (words_ND * 2.0**-32 * (second - first) + first).float()
            values_ND = torch.where(values_ND.double() >= second, below, values_ND)
        rows_LD[rows_N[start : start + block]] = values_ND.to(rows_LD.dtype)


def _largest_below(high: float, low: float) -> float:
    """The largest float32 below ``high``, or ``low``: rounding must not reach the end of the interval."""
    value = np.float32(high)
    if float(value) >= high:
        value = np.nextafter(value, np.float32(-math.inf))
    return float(max(value, np.float32(low)))


def inverse_normal(words: Tensor) -> Tensor:
    """Of (word + 1/2) / 2^32, float64."""
    q = (words + 0.5) * 2.0**-32 - 0.5
    central = 0.180625 - q * q
    middle = q * _polynomial(CENTRAL_TOP, central) / _polynomial(CENTRAL_BOTTOM, central)
    r = torch.sqrt(-_log(0.5 - q.abs())) - 1.6
    tail = _polynomial(TAIL_TOP, r) / _polynomial(TAIL_BOTTOM, r)
    return torch.where(q.abs() > 0.425, torch.where(q < 0, -tail, tail), middle)


def _log(x: Tensor) -> Tensor:
    """ln x of normal x in (0, 1): x = m · 2^e, ln m = 2 artanh((m − 1) / (m + 1))."""
    bits = x.view(torch.int64)
    e = (bits - SQRT_HALF_BITS) >> 52
    m = (bits - (e << 52)).view(torch.float64)
    s = (m - 1) / (m + 1)
    return e.double() * 0.6931471805599453 + 2 * s * _polynomial(LOG_SERIES, s * s)


def _polynomial(coefficients: Sequence[float], x: Tensor) -> Tensor:
    value = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + coefficient
    return value
