"""The best model of a run so far, by looks at a validation. The looks are a function of the step alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

LOOKS = 10
"""Of a stage."""
L = TypeVar("L")


class BestLook(Generic[L]):
    """The first look and the best one."""

    def __init__(self, score: Callable[[L], float], *, best: L | None = None, start: L | None = None) -> None:
        """``score`` of a look is higher for a better model; ``best`` and ``start`` are those of the run before."""
        self._score = score
        self.best, self.start = best, start

    def compare(self, look: L) -> bool:
        """Whether none was better; of equal ones, and of those whose score is NaN, the later is the best."""
        if self.start is None:
            self.start = look
        is_better = self.best is None or not self._score(look) < self._score(self.best)
        if is_better:
            self.best = look
        return is_better


def evaluation_period(stage_steps: int) -> int:
    """Steps between two looks of a stage."""
    return max(1, stage_steps // LOOKS)
