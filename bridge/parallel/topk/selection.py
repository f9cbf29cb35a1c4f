"""How many elements of a gradient travel."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from geartrain.ams.values.errors import InvalidArgument

MOST_ELEMENTS = 2**31 - 1
"""Of a tensor: indices travel as int32."""


def counts(numels: Sequence[int], sparsity: float, *, ranks: int = 2) -> list[int]:
    """How many elements of each tensor to send: ``numel`` where it had better be sent dense.

    k = max(1, ⌈numel · (1 − sparsity)⌉), with ``sparsity`` as it is written: 0.999 leaves one in 1000. A rank receives
    8 · k bytes (int32 index, float32 value) from each other rank; of a dense all-reduce it receives
    8 · numel / ranks bytes for each of them. So a tensor is dense where k · max(ranks, 2) >= numel.

    Raises:
        InvalidArgument: ``sparsity`` is outside [0, 1), a tensor has 2**31 elements or more, or ``ranks`` < 1.
    """
    if not 0 <= sparsity < 1:
        raise InvalidArgument(f"sparsity is {sparsity}; it must lie in [0, 1): 0.999 sends one element in 1000")
    if ranks < 1:
        raise InvalidArgument(f"ranks is {ranks}; it must be at least 1")
    kept = 1 - Fraction(repr(float(sparsity)))
    return [_count(numel, kept, ranks) for numel in numels]


def _count(numel: int, kept: Fraction, ranks: int) -> int:
    if not 0 <= numel <= MOST_ELEMENTS:
        raise InvalidArgument(f"a tensor has {numel} elements; sparsified ones have at most {MOST_ELEMENTS}")
    k = max(1, -(-numel * kept.numerator // kept.denominator))
    return numel if k * max(ranks, 2) >= numel else k
