"""Which classes are active in a step of a job, as its recipe says, and how a person hears of the graph behind them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from geartrain.ams.programs.selection import FullSoftmax, PartialFC, Selection
from geartrain.ams.values.text import counted
from geartrain.bridge.head.selection.knn_selection import KNNSoftmax

if TYPE_CHECKING:
    from geartrain.workers.recipes.recipe import Recipe

_SECONDS_BETWEEN_LINES = 5.0


def selection_of(recipe: Recipe) -> Selection:
    """What to give the head as ``select``."""
    return FullSoftmax() if recipe.sample_rate == 1 else SELECTIONS[recipe.select](recipe)


def rebuild_of(text: str) -> str | int:
    """``"200"`` as the number of steps that it is; the words as they are."""
    return int(text) if text.isdecimal() else text


SELECTIONS: dict[str, Callable[[Recipe], Selection]] = {
    "knn": lambda recipe: KNNSoftmax(recipe.sample_rate, recipe.neighbours, rebuild_of(recipe.rebuild)),
    "partial": lambda recipe: PartialFC(recipe.sample_rate),
    "full": lambda _: FullSoftmax(),
}
"""By the names that recipes give."""


class GraphLines:
    """Tells how far the building of a graph is: every five seconds, and when it is done. Use from one thread a build.

    Call it with (done, total).
    """

    def __init__(self, num_classes: int, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._classes = counted(num_classes, "class", "classes")
        self._say = say
        self._clock = clock
        self._started: float | None = None
        self._told = 0.0
        self._done = 0

    def __call__(self, done: int, total: int) -> None:
        now = self._clock()
        if self._started is None or done < self._done:  # the build before it was cancelled
            self._started = self._told = now
        self._done = done
        seconds = now - self._started
        if done >= total:
            self._started = None
            self._say(f"Graph of {self._classes} built in {seconds:.1f} s")
        elif done and now - self._told >= _SECONDS_BETWEEN_LINES:
            self._told = now
            left = seconds * (total - done) / done
            self._say(f"Graph of {self._classes}: {100 * done // total} %, {left:.0f} s left")
