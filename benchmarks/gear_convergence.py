"""Convergence of gear training by expiry and by number of workers: the paper's Figures 5 and 4, on halves of glyphs.

200 characters in six fonts, tested on a font family that training does not see; batch 64, Adam, M=4. A step lasts
0.564 s on the clock of expiry, the pace of the paper's Table 2. Accuracy is over steps of each worker, as if every
worker had a machine: several workers on this one would only share its cores. See ``_halves_task.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

from _common import result, threads
from _gear_race import keep
from _gear_task import THREADS
from _halves_task import BATCH, NUM_CLASSES, convergence
from gear import EXPIRIES, PAPER_STEP_SECONDS

from geartrain.launch.bench import Result

ROUNDS = 400
TEST_EVERY = 40
GRADIENTS_PER_ID = 4
WORKERS = (1, 2, 4)
WORKERS_EXPIRE_SECONDS = 20.0

Curve = list[tuple[int, float]]


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench gear_convergence``; ``full`` trains four times as long, over three seeds."""
    rounds, seeds = ROUNDS * (4 if full else 1), range(3 if full else 1)
    with threads(THREADS):
        conventional = {count: [_run(count, rounds, None, seed) for seed in seeds] for count in WORKERS}
        yield from by_expiry(rounds, seeds, conventional[1])
        yield from by_workers(rounds, seeds, conventional)


def by_expiry(rounds: int, seeds: range, conventional: list[Curve]) -> Iterator[Result]:
    """One worker, every expiry."""
    curves = {f"expiry {expire:g} s": [_run(1, rounds, expire, seed) for seed in seeds] for expire in EXPIRIES}
    keep("by_expiry", {"conventional": conventional, **curves})
    for name, runs in curves.items():
        yield _result(f"one worker, {name}", runs, conventional)


def by_workers(rounds: int, seeds: range, conventional: dict[int, list[Curve]]) -> Iterator[Result]:
    """Several workers, gear training and conventional."""
    kept = {}
    for count in WORKERS:
        curves = [_run(count, rounds, WORKERS_EXPIRE_SECONDS, seed) for seed in seeds]
        kept[f"gear, {count}"], kept[f"conventional, {count}"] = curves, conventional[count]
        yield _result(f"workers: {count}, expiry {WORKERS_EXPIRE_SECONDS:g} s", curves, conventional[count])
    keep("by_workers", kept)


def _run(num_workers: int, rounds: int, expire_seconds: float | None, seed: int) -> Curve:
    return convergence(
        num_workers,
        rounds,
        step_seconds=PAPER_STEP_SECONDS,
        expire_seconds=expire_seconds,
        gradients_per_id=GRADIENTS_PER_ID,
        test_every=TEST_EVERY,
        seed=seed,
    )


def _result(name: str, ours: list[Curve], theirs: list[Curve]) -> Result:
    """Mean accuracy along the run: how far up the curve lies, and not only where it ends."""
    mine, other = (100 * _mean_height(curves) for curves in (ours, theirs))
    ends = [100 * sum(curve[-1][1] for curve in curves) / len(curves) for curves in (ours, theirs)]
    case = (
        f"mean top-1 along {ours[0][-1][0]} steps, {NUM_CLASSES} glyphs in halves, batch {BATCH}, "
        f"M={GRADIENTS_PER_ID}, {name} (at the end {ends[0]:.1f} against {ends[1]:.1f})"
    )
    rival = "conventional training by as many workers"
    return result(case, max(mine, 0.01), rival, max(other, 0.01), "points", more_is_better=True)


def _mean_height(curves: list[Curve]) -> float:
    heights = [height for curve in curves for _, height in curve]
    return sum(heights) / len(heights)
