"""Gear training against conventional training: time of a run by expiry, and throughput where ids recur.

Page views (``_gear_task.py``), batch 128, D=64, Adam on both parts. Both sides have one thread: the slow gear runs in
the fast gear's process and makes its dense updates within the step (``mode="sync"``), of 128 ids each
(``ids_per_update``). How deep the dense part must be for its step to cost 20 times
the sparse part's is measured first; the cases quote the ratio found. Conventional training, in its best shape, is in
``_conventional_gear.py``. All take turns of 20 steps.

The clock of expiry is scaled: one conventional step lasts 0.564 s on it, the pace of the paper's Table 2 (282 s for 500
steps), so that a feature lives as many steps as it did there and a run takes seconds. It stands still while others
have their turn.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from _common import result, threads
from _conventional_gear import ConventionalTrainer
from _gear_formula import predicted
from _gear_race import Runner, close, equal_steps, first, keep
from _gear_task import BATCH, THREADS, blocks_for, fast_step, min_seconds, page_views, recurring
from _gear_trainer import GearTrainer, TrainingClock
from gear_data.page_views import PageViews, Views

from geartrain.launch.bench import Result

COST_RATIO = 20.0
PAPER_STEP_SECONDS = 282 / 500
STEPS = 500
EXPIRIES = (0.0, 1.0, 5.0, 20.0, 60.0)
EXPIRY_M = 16
EXPIRY_TARGET = 1 / 0.6
RECURRENCES = 50
THROUGHPUT = ((16, 5.0), (4, 2.5))
"""(M, the ratio promised)."""
THROUGHPUT_IDS = 512
THROUGHPUT_EXPIRE = 5.0


@dataclass(frozen=True)
class Costs:
    """What was measured first."""

    blocks: int
    """Depth of the dense part."""
    ratio: float
    """Cost of its step over that of the sparse part."""
    overhead: float
    """What gear training adds to a step, likewise."""
    speed: float
    """Of the clock."""

    def __str__(self) -> str:
        return f"dense part {self.ratio:.0f} x the sparse part's cost, clock x {self.speed:.1f}"


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench gear``; ``full`` has four times as many steps."""
    with threads(THREADS):
        data = page_views()
        blocks, ratio = blocks_for(COST_RATIO, data)
        speed = PAPER_STEP_SECONDS / conventional_step_seconds(data, blocks)
        costs = Costs(blocks, ratio, gear_overhead(data, blocks), speed)
        yield from throughput(data, costs, num_ids=THROUGHPUT_IDS * (4 if full else 1))
        yield from expiry(data, costs, steps=STEPS * (4 if full else 1))


def conventional_step_seconds(data: PageViews, blocks: int, rounds: int = 7) -> float:
    """Median of a few steps."""
    trainer = ConventionalTrainer(data, blocks=blocks)
    taken = []
    for views in first(data.train.batches(BATCH, seed=0), rounds + 1):
        started = time.perf_counter()
        trainer.step(views)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def gear_overhead(data: PageViews, blocks: int, rounds: int = 40) -> float:
    """What look-up and delivery add to a step of the sparse part, in units of that step: every feature a hit, no
    gradients due. The least of many, as in :func:`blocks_for`."""
    views = data.train.rows(torch.arange(BATCH))
    trainer = GearTrainer(data, TrainingClock(), blocks=blocks, expire_seconds=60.0, gradients_per_id=1 << 30)
    alone, joined = min_seconds([fast_step(data, views), functools.partial(trainer.step, views)], rounds)
    trainer.close()
    return max(0.0, joined / alone - 1)


def throughput(data: PageViews, costs: Costs, *, num_ids: int) -> Iterator[Result]:
    """Every id exactly 50 times; what still waits at the end is part of the time."""
    batches = list(recurring(data, num_ids, RECURRENCES, seed=0))
    rows = []
    for gradients_per_id, target in THROUGHPUT:
        runners = [
            _gear(data, costs, THROUGHPUT_EXPIRE, gradients_per_id),
            Runner("conventional", ConventionalTrainer(data, blocks=costs.blocks), TrainingClock(costs.speed)),
        ]
        equal_steps(runners, batches, finish=_flush)
        gear, rival = (runner.seconds for runner in runners)
        hits = runners[0].trainer.hit_rate  # type: ignore[attr-defined]
        close(runners)
        passes = math.ceil(RECURRENCES / gradients_per_id)  # of each id, backward: the last one is not full
        row = _row(data, batches, costs, THROUGHPUT_EXPIRE, RECURRENCES / passes, gear, rival, hits)
        rows.append({**row, "M": gradients_per_id})
        case = (
            f"{len(batches)} steps, each of {num_ids} ids {RECURRENCES} times, M={gradients_per_id}, expiry "
            f"{THROUGHPUT_EXPIRE:g} s (hit rate {hits:.2f}); {costs}"
        )
        ours, theirs = (len(batches) / seconds for seconds in (gear, rival))
        yield result(case, ours, ConventionalTrainer.name, theirs, "steps/s", target=target, more_is_better=True)
    keep("throughput", {"setting": f"{costs}, overhead {costs.overhead:.2f}", "rows": rows})


def expiry(data: PageViews, costs: Costs, *, steps: int) -> Iterator[Result]:
    """The paper's Table 2: the same page views at every expiry, and conventionally."""
    batches = first(data.train.batches(BATCH, seed=0, passes=10), steps)
    runners = [_gear(data, costs, seconds, EXPIRY_M) for seconds in EXPIRIES]
    rival = ConventionalTrainer(data, blocks=costs.blocks)
    runners.append(Runner("conventional", rival, TrainingClock(costs.speed)))
    equal_steps(runners, batches)
    seconds = [runner.seconds for runner in runners]
    hits = [runner.trainer.hit_rate for runner in runners[:-1]]  # type: ignore[attr-defined]
    close(runners)
    rows = [
        _row(data, batches, costs, expire, EXPIRY_M, taken, seconds[-1], hit)
        for expire, taken, hit in zip(EXPIRIES, seconds, hits, strict=False)
    ]
    keep("expiry", {"setting": f"{costs}, overhead {costs.overhead:.2f}", "rows": rows})
    for expire, taken, hit in zip(EXPIRIES, seconds, hits, strict=False):
        case = f"{steps} steps of page views, M={EXPIRY_M}, expiry {expire:g} s (hit rate {hit:.2f}); {costs}"
        target = EXPIRY_TARGET if expire == 20.0 else None
        yield result(case, taken, "expiry 1 s", seconds[EXPIRIES.index(1.0)], "s", target=target)


def _gear(data: PageViews, costs: Costs, expire: float, gradients_per_id: int) -> Runner:
    clock = TrainingClock(costs.speed)
    trainer = GearTrainer(data, clock, blocks=costs.blocks, expire_seconds=expire, gradients_per_id=gradients_per_id)
    return Runner(f"expiry {expire:g} s", trainer, clock)


def _flush(runner: Runner) -> None:
    if isinstance(runner.trainer, GearTrainer):
        runner.trainer.flush()


def _row(
    data: PageViews,
    batches: Sequence[Views],
    costs: Costs,
    expire: float,
    gradients_per_pass: float,
    ours: float,
    theirs: float,
    hits: float,
) -> dict[str, float]:
    """What was measured beside what the formula says of it."""
    ids = np.concatenate([views.images.unique().numpy() for views in batches])
    gain, hit = predicted(
        np.bincount(ids, minlength=len(data.pictures)) / len(batches),
        ratio=costs.ratio,
        gradients_per_pass=gradients_per_pass,
        expire_steps=expire / (theirs / len(batches) * costs.speed),
        steps=len(batches),
        overhead=costs.overhead,
    )
    return {
        "M": gradients_per_pass,
        "expire_seconds": expire,
        "steps": len(batches),
        "gear_seconds": round(ours, 3),
        "conventional_seconds": round(theirs, 3),
        "speed_up": round(theirs / ours, 3),
        "formula_speed_up": round(gain, 3),
        "hit_rate": round(hits, 4),
        "formula_hit_rate": round(hit, 4),
    }
