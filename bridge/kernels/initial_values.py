"""Initial values of rows, computed on their device; bit-identical to ``csrc/values/initial_values.hpp``.

Philox4x32-10 of (id, column / 4, hash of the table's name) under the seed, uniform or through the inverse of the
normal distribution.
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
from geartrain.bridge.kernels.philox import WORD, inverse_normal, philox_words

CONSTANT, UNIFORM, NORMAL = range(3)
_ROUNDS = 10
_BLOCK_NUMBERS = 1 << 20


class FirstValues(NamedTuple):
    """Parameters of a table's initial values, which depend on these, id and column alone."""

    distribution: int
    """CONSTANT (``first``), UNIFORM on [first, second) or NORMAL (mean and standard deviation)."""
    first: float
    second: float
    seed: int
    """Seed of the table, 64 bits."""
    table_hash: int
    """Hash of the table's name, 32 bits."""

    @property
    def numbers(self) -> tuple[int, int, float]:
        """Float64 bits of both parameters, as kernels take floats as float32; and the largest value."""
        low, high = struct.unpack("qq", struct.pack("dd", self.first, self.second))
        return low, high, _largest_below(self.second, self.first)


def write_initial_values(rows_ND: Tensor, first_id: int, values: FirstValues) -> None:
    """Write the first values of rows of consecutive ids, rounded to the nearest of their storage type.

    Args:
        rows_ND: float32, bfloat16 or float16, contiguous; overwritten.
        first_id: Id of row 0.
        values: Parameters of the table.

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
    """Write the initial values of rows of many tables, by one kernel for each width and type of rows.

    Args:
        tables: Rows [L, D] and parameters of each table; None: no rows of it are written.
        key_N: int64: table << bits, with any lower bits.
        bits: Lower bits of a key.
        ids_N: int64.
        numbers_N: Row numbers, int64; -1: none.
    """
    from geartrain.bridge.kernels.triton import initial_values as kernels

    groups: dict[tuple[torch.dtype, int, bool, int], list[int]] = {}
    for number, table in enumerate(tables):
        if table is not None:  # a constant is a normal distribution of deviation 0
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
    """Return the largest float32 below ``high``, or ``low``: rounding must not reach the end of the interval."""
    value = np.float32(high)
    if float(value) >= high:
        value = np.nextafter(value, np.float32(-math.inf))
    return float(max(value, np.float32(low)))
