"""The values of rows that nobody wrote, made where they are: those of ``csrc/values/initial_values.hpp``, bit by bit.

Philox4x32-10 of (id, column / 4, hash of the table's name) under the seed, uniform or through the inverse of the
normal distribution from + − · / and a root alone: Wichura's AS 241 (PPND16) with a logarithm of our own.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from geartrain.bridge.kernels.launch import Cost, address, launch, on_device, runs_kernels
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


class FirstValues(NamedTuple):
    """Of what the first values of a table are a function, beside id and column."""

    distribution: int
    """CONSTANT (``first``), UNIFORM on [first, second) or NORMAL (mean and standard deviation)."""
    first: float
    second: float
    seed: int
    """The table's, 64 bits."""
    table_hash: int
    """Of its name, 32 bits."""

    @property
    def numbers(self) -> tuple[int, int, float]:
        """The bits of both parameters as float64, for a kernel takes numbers as float32; and the largest value."""
        low, high = struct.unpack("qq", struct.pack("dd", self.first, self.second))
        return low, high, _largest_below(self.second, self.first)


def write_initial_values(rows_ND: Tensor, first_id: int, values: FirstValues) -> None:
    """Write the first values of rows of consecutive ids, rounded to the nearest of their storage type.

    Args:
        rows_ND: float32, bfloat16 or float16, contiguous; overwritten.
        first_id: Of row 0.
        values: Of the table.

    One kernel, or tensor operations on blocks of 8 MiB.
    """
    distribution, first, second, seed, table_hash = values
    if distribution == CONSTANT:
        rows_ND.fill_(first)
        return
    num, dim = rows_ND.shape
    low_bits, high_bits, below = values.numbers
    if runs_kernels(rows_ND.device):
        from geartrain.bridge.kernels.triton.initial_values import tile, write_rows

        options = tile(dim)
        launch(
            write_rows,
            (-(-num // options["N"]), -(-dim // options["C"])),
            rows_ND,
            low_bits,
            high_bits,
            below,
            num,
            first_id,
            seed,
            table_hash,
            cost=Cost(rows_ND.nbytes),
            D=dim,
            IS_NORMAL=distribution == NORMAL,
            enable_fp_fusion=False,
            **options,
        )
        return
    block = max(1, _BLOCK_NUMBERS // dim)
    columns = torch.arange(-(-dim // 4), device=rows_ND.device)
    hash_word = torch.full((), table_hash, device=rows_ND.device)
    for start in range(0, num, block):
        ids_N = torch.arange(first_id + start, first_id + min(start + block, num), device=rows_ND.device)
        low, high = (ids_N & WORD).unsqueeze(1), (ids_N >> 32).unsqueeze(1)
        words = philox_words(seed, (low, high, columns.unsqueeze(0), hash_word), _ROUNDS)
        words_ND = words.reshape(len(ids_N), -1)[:, :dim].double()
        if distribution == NORMAL:
            values_ND = (inverse_normal(words_ND) * second + first).float()
        else:
            values_ND = (words_ND * 2.0**-32 * (second - first) + first).float()
            values_ND = torch.where(values_ND.double() >= second, below, values_ND)
        rows_ND[start : start + block] = values_ND


def write_new_rows(
    tables: Sequence[tuple[Tensor, FirstValues] | None], key_N: Tensor, bits: int, ids_N: Tensor, numbers_N: Tensor
) -> None:
    """Write the first values of rows of many tables, by kernels: one for each width and type of rows.

    Args:
        tables: Rows [L, D] and what their values are of; None: not of this.
        key_N: int64: table << bits, and what you like.
        bits: Of keys.
        ids_N: int64.
        numbers_N: int64, of the rows; -1: there is none.
    """
    from geartrain.bridge.kernels.triton import initial_values as kernels

    groups: dict[tuple[torch.dtype, int, bool, int], list[int]] = {}
    for number, table in enumerate(tables):
        if table is not None:  # of a constant it is a normal distribution without deviation
            rows_LD, values = table
            kind = rows_LD.dtype, rows_LD.shape[1], values.distribution != UNIFORM, values.seed
            groups.setdefault(kind, []).append(number)
    num = len(ids_N)
    for (dtype, dim, is_normal, seed), members in groups.items():
        numbers = [0] * (8 * len(tables))
        for number in members:
            table = tables[number]
            assert table is not None
            low, high, below = table[1].numbers
            (below_bits,) = struct.unpack("i", struct.pack("f", below))
            numbers[8 * number : 8 * number + 5] = [address(table[0]), low, high, below_bits, table[1].table_hash]
        options = kernels.tile(dim)
        launch(
            kernels.write_new_rows,
            (-(-num // options["N"]), -(-dim // options["C"])),
            on_device(numbers, ids_N.device),
            torch.empty(0, dtype=dtype, device=ids_N.device),
            key_N,
            ids_N,
            numbers_N,
            num,
            bits,
            seed,
            cost=Cost(8 * num),  # as if none were new, as most are not in a step
            D=dim,
            IS_NORMAL=is_normal,
            enable_fp_fusion=False,
            **options,
        )


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
