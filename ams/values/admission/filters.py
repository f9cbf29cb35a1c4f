"""False positive rate of a blocked counting Bloom filter, and the number of hashes that suits a rate.

Formula: Putze et al., "Cache-, Hash- and Space-Efficient Bloom Filters" (2007), section 3.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

BLOCK_BYTES = 64
"""Bytes of a block of the filter, a cache line: all counters of an id lie in one block."""
_MAX_HASHES = 16


class Best(NamedTuple):
    """Filter that counts the most ids at a rate."""

    num_hashes: int
    """Number of counters of an id."""
    ids_of_block: float
    """Mean number of ids of a block at which the rate is reached."""


def rate_of(ids_of_block: float, counters: int, num_hashes: int) -> float:
    """Return the probability that other ids have raised all ``num_hashes`` counters of an id, where a block has
    ``counters`` counters and ``ids_of_block`` ids on the average: Σⱼ Poisson(j; ids) · (1 - (1 - 1/B)^(k·j))^k.
    """
    if ids_of_block <= 0:
        return 0.0
    ids = np.arange(1, int(ids_of_block + 12 * math.sqrt(ids_of_block) + 24))
    logs = ids * math.log(ids_of_block) - ids_of_block - np.cumsum(np.log(ids))
    raised = -np.expm1(num_hashes * ids * math.log1p(-1 / counters))
    return float(np.sum(np.exp(logs) * raised**num_hashes))


@lru_cache
def best(counters: int, rate: float) -> Best:
    """Return the filter that counts the most ids before ``rate`` is exceeded."""

    def fitting(num_hashes: int) -> float:
        low, high = 0.0, 4.0 * counters
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if rate_of(middle, counters, num_hashes) <= rate else (low, middle)
        return low

    return max((Best(k, fitting(k)) for k in range(1, _MAX_HASHES + 1)), key=lambda found: found.ids_of_block)
