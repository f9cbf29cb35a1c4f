"""Number of elements of a gradient that are sent, and the sparsity of each step."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from geartrain.ams.values.errors import InvalidArgument

MAX_ELEMENTS = 2**31 - 1
"""Largest number of elements of a tensor, since indices are sent as int32."""
SMALL = 4096
"""Number of elements up to which a tensor is always dense: biases and norms, which are few bytes."""
_FIRST_KEPT = 0.25
"""Share sent at the first level of the warm-up, and the factor from one level to the next."""


def sent_counts(numels: Sequence[int], sparsity: float, ranks: int) -> list[int]:
    """Return the number of elements that a rank sends of each tensor: all if it is small, or cheaper dense."""
    found = counts(numels, sparsity, ranks=ranks)
    return [numel if numel <= SMALL else k for numel, k in zip(numels, found, strict=True)]


def counts(numels: Sequence[int], sparsity: float, *, ranks: int = 2) -> list[int]:
    """Return the number of elements to send of each tensor: ``numel`` where dense is cheaper.

    k = max(1, ⌈numel · (1 − sparsity)⌉), with ``sparsity`` in [0, 1) as a decimal: 0.999 leaves one in 1000. Sparse, a
    rank receives 8 · k bytes (int32 index, float32 value) from each other rank; in a dense all-reduce it receives
    8 · numel / ranks bytes for each of them. So a tensor is dense if k · max(ranks, 2) >= numel.

    Raises InvalidArgument for a tensor of 2**31 elements or more.
    """
    kept = 1 - Fraction(repr(float(sparsity)))
    return [_count(numel, kept, ranks) for numel in numels]


def _count(numel: int, kept: Fraction, ranks: int) -> int:
    if numel > MAX_ELEMENTS:
        raise InvalidArgument(f"a tensor has {numel} elements; sparsified ones have at most {MAX_ELEMENTS}")
    k = max(1, -(-numel * kept.numerator // kept.denominator))
    return numel if k * max(ranks, 2) >= numel else k


def sparsity_at(step: int, sparsity: float, warmup_steps: int) -> float:
    """Return the sparsity of ``step``, counted from 0: 75, 93.75, 98.4, 99.6 % (levels below ``sparsity``), then that.

    The levels share ``warmup_steps`` evenly (Lin 2017, section 3.3, where each is an epoch).
    """
    if step >= warmup_steps:
        return sparsity
    levels: list[float] = []
    while (level := 1 - _FIRST_KEPT ** (len(levels) + 1)) < sparsity:
        levels.append(level)
    return levels[step * len(levels) // warmup_steps] if levels else sparsity
