"""How many micro-batches each step has: few, then more and more along half a cosine."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property

_LAST_BITS = 1e-9
"""By so much a half may fall short: it is a whole one more on every machine, whatever the last bits of its sine."""


@dataclass(frozen=True, kw_only=True)
class BatchRamp:
    """Micro-batches of the steps from 0 to ``total_steps``, as an exact function of the step that never falls.

    ``first`` until ``initial_steps``, then first + (last − first) · (1 − cos(π x)) / 2 to the nearest whole one, where
    x rises from 0 at ``initial_steps`` to 1 at ``total_steps``.
    """

    first: int
    last: int
    initial_steps: int
    total_steps: int

    def at(self, step: int) -> int:
        """Micro-batches of ``step``; from ``total_steps`` on those of the last step."""
        return self.first + bisect_right(self._growth, step)

    def before(self, step: int) -> int:
        """Micro-batches of all steps before ``step``."""
        grown = bisect_right(self._growth, step)
        return (self.first + grown) * step - self._growth_sums[grown]

    @cached_property
    def _growth(self) -> list[int]:
        """The steps at which one more micro-batch begins to count, rising; several may be the same."""
        ramp = range(self.initial_steps, self.total_steps)
        places = (bisect_left(ramp, count, key=self._rounded) for count in range(self.first + 1, self.last + 1))
        return [ramp[place] for place in places if place < len(ramp)]

    @cached_property
    def _growth_sums(self) -> list[int]:
        return list(itertools.accumulate(self._growth, initial=0))

    def _rounded(self, step: int) -> int:
        part = (step - self.initial_steps) / (self.total_steps - self.initial_steps)
        grown = (self.last - self.first) * math.sin(math.pi / 2 * part) ** 2
        return self.first + math.floor(grown + 0.5 + _LAST_BITS)
