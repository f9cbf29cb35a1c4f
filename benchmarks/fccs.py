"""FCCS beside piecewise decay, Adam and itself without a growing batch, as in table 7 of the 100M-class paper.

Glyphs of held-out type designs, 2,000 classes, 3 seeds, a small network. FCCS drives LARS: a tenth of the epochs warms
the rate up, and after half of them the batch grows from 64 to 1024. The rival is piecewise decay in its best shape: SGD
with Nesterov momentum, a tenth of the rate after 0.6 and again after 0.85 of the epochs (the paper's, after every
quarter, is 2 points worse), at its best length: the shortest one whose accuracy is within 0.2 points of the greatest.
The accuracy to reach is its mean less 0.4 points. FCCS has a set length, so it trains anew for several parts of the
rival's epochs: the shortest that reaches it counts; the last one is all of them, and the case says so where that does
not reach it.

Tuned on seeds that are not among those: rates and decays of weights of piecewise (some thirty runs of 36 to 192
epochs), of FCCS (some ninety of 24 to 96) with its largest batch and when that begins, places of the decays, the rate
of Adam, which is constant as in the paper. Rows of accuracies show other ways after as many epochs: piecewise of LARS
at the rate of FCCS, piecewise by fifths instead of tenths, half a cosine, and FCCS without its batch policy. Biases and
weights of norms never decay. Trainings run beside each other, one a core; only their accuracy counts.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager

from _common import result
from _fccs_task import (
    ADAM,
    CONSTANT,
    COSINE,
    FCCS,
    FIFTHS,
    LARS,
    NUM_CLASSES,
    PIECEWISE,
    begin_process,
    glyph_task,
    train,
)

from geartrain.launch.bench import Result

SEEDS = 3
LENGTHS = (24, 48, 72, 96, 144, 192)
"""Epochs of piecewise."""
PARTS = (0.25, 0.4, 0.5, 0.75, 1.0)
"""Epochs of FCCS, as parts of the best of those."""
OTHERS = (PIECEWISE, LARS, FIFTHS, COSINE, CONSTANT, ADAM)
NOISE, ALLOWED_POINTS = 0.2, 0.4


class Trainings:
    """Accuracies, per cent seed by seed, of trainings that were made when they were asked for first."""

    def __init__(self, pool: Executor, seeds: int) -> None:
        self._pool = pool
        self.seeds = seeds
        self._made: dict[tuple[str, int], list[float]] = {}

    def make(self, way: str, lengths: Sequence[int]) -> None:
        """Train for each of so many epochs, all at once."""
        jobs = [(way, epochs, seed) for epochs in sorted(lengths, reverse=True) for seed in range(self.seeds)]
        jobs = [job for job in jobs if job[:2] not in self._made]
        for (_, epochs, seed), top1 in zip(jobs, self._pool.map(train, jobs), strict=True):
            print(f"{way}, {epochs} epochs, seed {seed}: {top1:.2f} %", file=sys.stderr, flush=True)
            self._made.setdefault((way, epochs), []).append(top1)

    def of(self, way: str, epochs: int) -> list[float]:
        """Its accuracies."""
        self.make(way, [epochs])
        return self._made[way, epochs]

    def mean(self, way: str, epochs: int) -> float:
        """Over the seeds."""
        return statistics.mean(self.of(way, epochs))

    def first_to(self, way: str, lengths: Sequence[int], least: float) -> int:
        """The shortest of rising ``lengths`` whose mean accuracy is at least so much; if none is, the longest."""
        return next((epochs for epochs in lengths if self.mean(way, epochs) >= least), lengths[-1])

    def told(self, way: str, epochs: int) -> str:
        """Mean and standard error."""
        found = self.of(way, epochs)
        error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.nan
        return f"{statistics.mean(found):.2f} ± {error:.2f} %"


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench fccs``; ``full`` takes twice the seeds."""
    with _pool() as pool:
        yield from _cases(Trainings(pool, SEEDS * (2 if full else 1)))


def _cases(trainings: Trainings) -> Iterator[Result]:
    trainings.make(PIECEWISE, LENGTHS)
    greatest = max(trainings.mean(PIECEWISE, epochs) for epochs in LENGTHS)
    best = trainings.first_to(PIECEWISE, LENGTHS, greatest - NOISE)
    goal = trainings.mean(PIECEWISE, best) - ALLOWED_POINTS
    lengths = [round(part * best) for part in PARTS]
    ours = trainings.first_to(FCCS, lengths, goal)
    sizes = f"{NUM_CLASSES:,} classes, {trainings.seeds} seeds"
    reached = "" if trainings.mean(FCCS, ours) >= goal else ", NOT REACHED"
    case = f"{sizes}: epochs to {goal:.2f} %{reached} (FCCS {trainings.told(FCCS, ours)}; "
    case += f"piecewise at its best length {trainings.told(PIECEWISE, best)})"
    yield result(case, ours, "piecewise", best, "epochs", target=2.0)
    shorter = trainings.first_to(PIECEWISE, LENGTHS, goal)
    case = f"{sizes}: epochs to it (piecewise {trainings.told(PIECEWISE, shorter)})"
    yield result(case, ours, "piecewise, shorter", shorter, "epochs", target=None)
    for way, epochs in ((way, epochs) for epochs in (ours, best) for way in OTHERS):
        case = f"{sizes}: accuracy after {ours} epochs of FCCS, {epochs} of the other ({trainings.told(way, epochs)})"
        top1 = trainings.mean(FCCS, ours), trainings.mean(way, epochs)
        yield result(case, top1[0], way, top1[1], "%", target=None, more_is_better=True)


@contextmanager
def _pool() -> Iterator[Executor]:
    """A process for each core."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    with ProcessPoolExecutor(cores, mp_context=context, initializer=begin_process, initargs=(glyph_task(),)) as pool:
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)
