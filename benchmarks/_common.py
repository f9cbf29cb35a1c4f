"""Shared parts of the benches: timing of calls of milliseconds, result lines, number of threads.

Sides take turns of several calls, the first of which do not count.

A call after another side's finds the caches full of its bytes and pays for writing them back, which is little for a
call of 15 ms and much for one of 2. A training loop calls one side repeatedly; so does a turn. Turns alternate (A A A A
B B B B A A A A …), so that a machine that becomes slower does so for all.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from geartrain.launch.bench import Result

Sample = TypeVar("Sample")


def median_seconds(
    sides: Sequence[Callable[[Sample], object]],
    draw: Callable[[], Sample],
    *,
    rounds: int,
    calls: int = 16,
    uncounted: int = 4,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Return the median seconds of a call of each side.

    Args:
        sides: functions to time; each is called with a fresh sample.
        draw: makes a sample, outside the timing.
        rounds: counted turns of each side, after one that does not count.
        calls: of a turn.
        uncounted: first calls of a turn that do not count.
        clock: in seconds; ``time.process_time`` counts the CPU time of all threads of this process.
    """
    times: list[list[float]] = [[] for _ in sides]
    for number in range(rounds + 1):
        for side, seconds in zip(sides, times, strict=True):
            samples = [draw() for _ in range(calls)]
            taken = [_seconds(side, sample, clock) for sample in samples]
            if number:
                seconds += taken[uncounted:]
    return [statistics.median(seconds) for seconds in times]


def _seconds(side: Callable[[Sample], object], sample: Sample, clock: Callable[[], float]) -> float:
    start = clock()
    side(sample)
    return clock() - start


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Make torch use so many threads during the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def result(
    case: str,
    ours: float,
    rival: str,
    theirs: float,
    unit: str,
    *,
    target: float | None = None,
    more_is_better: bool = False,
) -> Result:
    """Return a result line; the ratio is above 1 where Geartrain wins."""
    ratio = ours / theirs if more_is_better else theirs / ours
    return Result(
        case=case,
        ours=_rounded(ours),
        rival=rival,
        theirs=_rounded(theirs),
        unit=unit,
        ratio=_rounded(ratio),
        target=None if target is None else round(target, 2),
    )


def _rounded(figure: float) -> float:
    return float(f"{figure:.4g}")
