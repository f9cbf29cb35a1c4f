"""Stochastic rounding to 16 bits in plain numpy: the specification of ``csrc/values/rounding.hpp``, bit by bit.

A value between two neighbours of the storage type becomes the one farther from zero with a chance that is the part cut
off, so that its mean stays. The random bits are Philox4x32-7 of (seed, table, id, column, number of the row's update):
the same wherever a row lies, and in a replay.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.specs import DTYPES
from tests.specification.ops import U32, Floats, philox4x32, splitmix64

ROW, SLOT, LATE_ROW, LATE_SLOT = range(4)
"""What is rounded. A second gradient of a step that has not ended has random bits of its own."""
ROUNDS = 7
_COLUMNS = 8


def rounding_key(seed: int, table_hash: int) -> int:
    """The key of a table's draws."""
    return int(splitmix64(splitmix64(np.array([seed], np.uint64)) ^ np.uint64(table_hash))[0])


def draws(key: int, row_id: int, number: int, part: int, dim: int) -> npt.NDArray[np.uint16]:
    """Return 16 random bits for each column [D] of a row's update ``number``. Exact."""
    blocks = -(-dim // _COLUMNS)
    counters = np.empty((blocks, 4), U32)
    counters[:, 0], counters[:, 1] = row_id % 2**32, row_id >> 32
    counters[:, 2], counters[:, 3] = number % 2**32, np.arange(blocks) + part * 2**16
    words = philox4x32((key % 2**32, key >> 32), counters, rounds=ROUNDS)
    return words.astype("<u4").reshape(-1).view("<u2")[:dim].astype(np.uint16)


def rounded(values: Floats, drawn: npt.NDArray[np.uint16], dtype: str) -> npt.NDArray[Any]:
    """Return float32 ``values`` in ``dtype`` by as many draws. Exact.

    What round to nearest makes infinite or NaN becomes that; nothing else becomes infinite. float16 below 2^-17 is
    first cut to multiples of 2^-40.
    """
    if dtype == "float32":
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        nearest = values.astype(DTYPES[dtype])
    bits, draw = values.view(U32), drawn.astype(U32)
    magnitude, sign = bits & U32(0x7FFFFFFF), bits >> U32(16) & U32(0x8000)
    if dtype == "bfloat16":
        away, largest = magnitude + draw >> U32(16), U32(0x7F7F)
    else:
        small = np.where(magnitude < 0x38800000, values, 0)
        subnormal = (np.abs(small) * np.float32(2**40)).astype(U32) + draw >> U32(16)
        normal = magnitude - U32(0x38000000) + (draw >> U32(3)) >> U32(13)
        away, largest = np.where(magnitude < 0x38800000, subnormal, normal), U32(0x7BFF)
    stored = (np.minimum(away, largest) | sign).astype(np.uint16).view(DTYPES[dtype])
    return np.where(np.isfinite(nearest), stored, nearest)


def stored(values: Floats, dtype: str, *, key: int, row_id: int, number: int, part: int) -> npt.NDArray[Any]:
    """Return one row's values [D] as a table keeps them after the row's update ``number``. Exact."""
    return rounded(values, draws(key, row_id, number, part, len(values)), dtype)
