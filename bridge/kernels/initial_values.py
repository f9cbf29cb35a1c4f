"""The values of rows that nobody wrote, made where they are: those of ``csrc/values/initial_values.hpp``, bit by bit.

Philox4x32-10 of (id, column / 4, hash of the table's name) under the seed, uniform or through ``normal_quantile.py``.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from geartrain.bridge.kernels.launch import Cost, launch, runs_kernels
from geartrain.bridge.kernels.normal_quantile import inverse_normal
from geartrain.bridge.kernels.philox import WORD, philox_words

CONSTANT, UNIFORM, NORMAL = range(3)
_ROUNDS = 10
_BLOCK_NUMBERS = 1 << 20


def write_initial_values(
    rows_ND: Tensor, first_id: int, *, distribution: int, first: float, second: float, seed: int, table_hash: int
) -> None:
    """Write the first values of rows of consecutive ids, rounded to the nearest of their storage type.

    Args:
        rows_ND: float32, bfloat16 or float16, contiguous; overwritten.
        first_id: Of row 0.
        distribution: CONSTANT (``first``), UNIFORM on [first, second) or NORMAL (mean and standard deviation).
        first: See there.
        second: See there.
        seed: The table's, 64 bits.
        table_hash: Of its name, 32 bits.

    One kernel, or tensor operations on blocks of 8 MiB.
    """
    if distribution == CONSTANT:
        rows_ND.fill_(first)
        return
    num, dim = rows_ND.shape
    below = _largest_below(second, first)
    if runs_kernels(rows_ND.device):
        from geartrain.bridge.kernels.triton.initial_values import tile, write_rows

        options = tile(dim)
        launch(
            write_rows,
            (-(-num // options["N"]), -(-dim // options["C"])),
            rows_ND,
            torch.tensor([first, second], dtype=torch.float64, device=rows_ND.device),
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


def _largest_below(high: float, low: float) -> float:
    """The largest float32 below ``high``, or ``low``: rounding must not reach the end of the interval."""
    value = np.float32(high)
    if float(value) >= high:
        value = np.nextafter(value, np.float32(-math.inf))
    return float(max(value, np.float32(low)))
