"""Best model of a run so far, by validations whose steps are a function of the step alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

LOOKS = 10
"""Validations of a stage."""
L = TypeVar("L")


class BestValidation(Generic[L]):
    """First and best validation of a run."""

    def __init__(self, score: Callable[[L], float], *, best: L | None = None, start: L | None = None) -> None:
        """``score`` of a validation is higher for a better model; ``best`` and ``start`` are those of an earlier
        process."""
        self._score = score
        self.best, self.start = best, start

    def compare(self, look: L) -> bool:
        """Return whether no earlier one was better; of equal scores, and of NaN, the later is the best."""
        if self.start is None:
            self.start = look
        is_better = self.best is None or not self._score(look) < self._score(self.best)
        if is_better:
            self.best = look
        return is_better


def evaluation_period(stage_steps: int) -> int:
    """Return the steps between two validations of a stage."""
    return max(1, stage_steps // LOOKS)
