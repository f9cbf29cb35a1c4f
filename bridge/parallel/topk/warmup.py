"""How sparse the gradients of a step are."""

from __future__ import annotations

_FIRST_KEPT = 0.25
"""What the first level sends, and by what each level sends less than the one before."""


def sparsity_at(step: int, sparsity: float, warmup_steps: int) -> float:
    """The sparsity of ``step``, from 0 on: 75, 93.75, 98.4, 99.6 % (so many levels as are below ``sparsity``), then it.

    The levels share ``warmup_steps`` evenly (Lin 2017, section 3.3, where each is an epoch).
    """
    if step >= warmup_steps:
        return sparsity
    levels: list[float] = []
    while (level := 1 - _FIRST_KEPT ** (len(levels) + 1)) < sparsity:
        levels.append(level)
    return levels[step * len(levels) // warmup_steps] if levels else sparsity
