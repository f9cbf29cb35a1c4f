"""Stochastic rounding to 16 bits in tensor operations: the bits of ``tests/specification/rounding.py`` on any device.

Legend: N rows of a call, D width.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.kernels.ops import splitmix64
from geartrain.bridge.kernels.launch import Cost, launch, runs_kernels
from geartrain.bridge.kernels.philox import WORD, philox_words

ROW, SLOT = 0, 1
"""Part of a row that is rounded: its values, or its slots."""
_COLUMNS = 8
_ROUNDS = 7


def rounding_key(seed: int, table_hash: int) -> int:
    """Return the key of a table's random bits."""
    return int(splitmix64(splitmix64(np.array([seed], np.uint64)) ^ np.uint64(table_hash))[0])


def round_rows(
    values_ND: Tensor, dtype: torch.dtype, *, key: int | Tensor, ids_N: Tensor, numbers_N: Tensor, part: int
) -> Tensor:
    """Return ``values_ND`` as ``dtype``: 16 bits rounded stochastically, float32 unchanged.

    Args:
        values_ND: float32 or float64, which becomes float32 first.
        dtype: The storage type.
        key: ``rounding_key`` of the table; or int64 [N], one for each row.
        ids_N: int64, ids of the rows.
        numbers_N: int64, number of each row's update, from 1.
        part: ROW or SLOT.

    One kernel where each row has a key; else about 90 operations on N · D / 8 64-bit integers, and 20 on N · D numbers.
    """
    values_ND = values_ND.to(torch.float32)
    if dtype == torch.float32:
        return values_ND
    if isinstance(key, Tensor) and runs_kernels(values_ND.device):
        from geartrain.bridge.kernels.triton.rounding import round_rows as kernel
        from geartrain.bridge.kernels.triton.rounding import tile

        (num, dim), options = values_ND.shape, tile(values_ND.shape[1])
        out_ND = torch.empty_like(values_ND, dtype=dtype)
        launch(
            kernel,
            (-(-num // options["N"]), -(-dim // options["C"])),
            values_ND,
            out_ND,
            ids_N,
            numbers_N,
            key,
            num,
            cost=Cost(num * (dim * (4 + dtype.itemsize) + 24)),
            D=dim,
            PART=part,
            enable_fp_fusion=False,
            **options,
        )
        return out_ND
    nearest_ND = values_ND.to(dtype)
    bits = values_ND.contiguous().view(torch.int32)
    drawn = draws(key, ids_N, numbers_N, part, values_ND.shape[1])
    magnitude = bits & 0x7FFFFFFF
    if dtype == torch.bfloat16:
        away, largest = (magnitude + drawn) >> 16, 0x7F7F
    else:
        is_subnormal = magnitude < 0x38800000
        small = torch.where(is_subnormal, values_ND.abs(), 0.0)
        subnormal = ((small * 2.0**40).to(torch.int32) + drawn) >> 16
        normal = (magnitude - 0x38000000 + (drawn >> 3)) >> 13
        away, largest = torch.where(is_subnormal, subnormal, normal), 0x7BFF
    # The float's sign bit becomes that of an int16.
    stored = away.clamp_(max=largest) - ((bits < 0).to(torch.int32) << 15)
    return torch.where(torch.isfinite(nearest_ND), stored.to(torch.int16).view(dtype), nearest_ND)


def draws(key: int | Tensor, ids_N: Tensor, numbers_N: Tensor, part: int, dim: int) -> Tensor:
    """Return 16 random bits a column, int32 [N, D]: Philox4x32-7 of (id, number, column / 8 and part) under ``key``."""
    blocks = torch.arange(-(-dim // _COLUMNS), device=ids_N.device) + (part << 16)
    low_N, high_N = (ids_N & WORD).unsqueeze(1), (ids_N >> 32 & WORD).unsqueeze(1)
    key = key.unsqueeze(1) if isinstance(key, Tensor) else key
    words = philox_words(key, (low_N, high_N, (numbers_N & WORD).unsqueeze(1), blocks.unsqueeze(0)), _ROUNDS)
    halves = torch.stack([words & 0xFFFF, words >> 16], 3)
    return halves.flatten(1)[:, :dim].to(torch.int32)
