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

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from _conventional_gear import ConventionalTrainer
from _gear_formula import predicted
from _gear_race import Runner, close, equal_steps, first, keep
from _gear_task import BATCH, THREADS, blocks_for, page_views, recurring
from _gear_trainer import GearTrainer, TrainingClock

from geartrain.workers.data.page_views import PageViews, Views

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


def results(full: bool = False) -> Iterator[dict[str, Any]]:
    """The cases of ``geartrain bench gear``; ``full`` has four times as many steps."""
    threads = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        data = page_views()
        blocks, ratio = blocks_for(COST_RATIO, data)
        speed = PAPER_STEP_SECONDS / conventional_step_seconds(data, blocks)
        setting = f"dense part {ratio:.0f} x the sparse part's cost, clock x {speed:.1f}"
        yield from throughput(data, blocks, ratio, speed, setting, num_ids=THROUGHPUT_IDS * (4 if full else 1))
        yield from expiry(data, blocks, ratio, speed, setting, steps=STEPS * (4 if full else 1))
    finally:
        torch.set_num_threads(threads)


def conventional_step_seconds(data: PageViews, blocks: int, rounds: int = 7) -> float:
    """Median of a few steps."""
    trainer = ConventionalTrainer(data, blocks=blocks)
    taken = []
    for views in first(data.train.batches(BATCH, seed=0), rounds + 1):
        started = time.perf_counter()
        trainer.step(views)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


def throughput(
    data: PageViews, blocks: int, ratio: float, speed: float, setting: str, *, num_ids: int
) -> Iterator[dict[str, Any]]:
    """Every id exactly 50 times; what still waits at the end is part of the time."""
    batches = list(recurring(data, num_ids, RECURRENCES, seed=0))
    rows = []
    for gradients_per_id, target in THROUGHPUT:
        runners = [
            _gear(data, blocks, speed, THROUGHPUT_EXPIRE, gradients_per_id),
            Runner("conventional", ConventionalTrainer(data, blocks=blocks), TrainingClock(speed)),
        ]
        equal_steps(runners, batches, finish=_flush)
        gear, rival = (runner.seconds for runner in runners)
        hits = runners[0].trainer.hit_rate  # type: ignore[attr-defined]
        close(runners)
        rows.append(_row(batches, ratio, speed, THROUGHPUT_EXPIRE, gradients_per_id, gear, rival, hits, data))
        yield {
            "case": f"{len(batches)} steps, each of {num_ids} ids {RECURRENCES} times, M={gradients_per_id}, expiry "
            f"{THROUGHPUT_EXPIRE:g} s (hit rate {hits:.2f}); {setting}",
            "ours": round(len(batches) / gear, 1),
            "rival": ConventionalTrainer.name,
            "theirs": round(len(batches) / rival, 1),
            "unit": "steps/s",
            "ratio": round(rival / gear, 2),
            "target": target,
        }
    keep("throughput", {"setting": setting, "rows": rows})


def expiry(
    data: PageViews, blocks: int, ratio: float, speed: float, setting: str, *, steps: int
) -> Iterator[dict[str, Any]]:
    """The paper's Table 2: the same page views at every expiry, and conventionally."""
    batches = first(data.train.batches(BATCH, seed=0, passes=10), steps)
    runners = [_gear(data, blocks, speed, seconds, EXPIRY_M) for seconds in EXPIRIES]
    runners.append(Runner("conventional", ConventionalTrainer(data, blocks=blocks), TrainingClock(speed)))
    equal_steps(runners, batches)
    seconds = [runner.seconds for runner in runners]
    hits = [runner.trainer.hit_rate for runner in runners[:-1]]  # type: ignore[attr-defined]
    close(runners)
    rows = [
        _row(batches, ratio, speed, expire, EXPIRY_M, taken, seconds[-1], hit, data)
        for expire, taken, hit in zip(EXPIRIES, seconds, hits, strict=False)
    ]
    keep("expiry", {"setting": setting, "rows": rows})
    one = EXPIRIES.index(1.0)
    for expire, taken, hit in zip(EXPIRIES, seconds, hits, strict=False):
        yield {
            "case": f"{steps} steps of page views, M={EXPIRY_M}, expiry {expire:g} s (hit rate {hit:.2f}); {setting}",
            "ours": round(taken, 2),
            "rival": "expiry 1 s",
            "theirs": round(seconds[one], 2),
            "unit": "s",
            "ratio": round(seconds[one] / taken, 2),
            "target": round(EXPIRY_TARGET, 2) if expire == 20.0 else None,
        }


def _gear(data: PageViews, blocks: int, speed: float, expire: float, gradients_per_id: int) -> Runner:
    clock = TrainingClock(speed)
    trainer = GearTrainer(data, clock, blocks=blocks, expire_seconds=expire, gradients_per_id=gradients_per_id)
    return Runner(f"expiry {expire:g} s", trainer, clock)


def _flush(runner: Runner) -> None:
    if isinstance(runner.trainer, GearTrainer):
        runner.trainer.flush()


def _row(
    batches: Sequence[Views],
    ratio: float,
    speed: float,
    expire: float,
    gradients_per_id: int,
    ours: float,
    theirs: float,
    hits: float,
    data: PageViews,
) -> dict[str, float]:
    """What was measured beside what the formula says of it (without overhead)."""
    asked = np.bincount(
        np.concatenate([views.images.unique().numpy() for views in batches]), minlength=len(data.pictures)
    )
    step_seconds = theirs / len(batches) * speed
    gain, hit = predicted(
        asked / len(batches),
        ratio=ratio,
        gradients_per_id=gradients_per_id,
        expire_steps=expire / step_seconds,
        steps=len(batches),
    )
    return {
        "M": gradients_per_id,
        "expire_seconds": expire,
        "steps": len(batches),
        "gear_seconds": round(ours, 3),
        "conventional_seconds": round(theirs, 3),
        "speed_up": round(theirs / ours, 3),
        "formula_speed_up": round(gain, 3),
        "hit_rate": round(hits, 4),
        "formula_hit_rate": round(hit, 4),
    }
