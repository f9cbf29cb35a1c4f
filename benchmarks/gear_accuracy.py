"""Accuracy cost of gear training: AUC of page views at equal time, and after equal steps over five seeds.

The setting, the rival and the clock are those of ``gear.py``; M=4 and an expiry of 5 s are also one of its cases of
throughput. AUC is that of all test views under the weights of the moment: the features of the test are computed anew,
none comes out of a cache. Testing takes no time on a trainer's clock.

After equal steps the cost of the dense part plays no role, only how many steps a feature lives. So a shallow dense part
serves, and a step of gear training lasts, on the clock of expiry, what it would where a conventional one lasts 0.564 s
(as in the paper) and gear training is faster by what ``gear.py`` promises: the run is the same on every machine.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator

from _common import result, threads
from _conventional_gear import ConventionalTrainer
from _gear_race import Runner, close, equal_seconds, equal_steps, first, keep, row_of_curves
from _gear_task import BATCH, THREADS, blocks_for, page_views
from _gear_trainer import GearTrainer, StepClock, TrainingClock
from gear import COST_RATIO, PAPER_STEP_SECONDS, conventional_step_seconds

from geartrain.launch.bench import Result

GRADIENTS_PER_ID = 4
SPEED_UPS = {4: 2.5, 16: 5.0}
"""M -> what gear.py promises."""
EXPIRE_SECONDS = 5.0
SECONDS = 30.0
TESTS = 10
SEEDS = 5
STEPS = 600
"""About one pass over the views."""
SHALLOW_BLOCKS = 1
ALLOWED_POINTS = 0.5


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench gear_accuracy``; ``full`` trains longer, and with M=16, too."""
    with threads(THREADS):
        yield from at_equal_time(SECONDS * (4 if full else 1))
        for gradients_per_id in SPEED_UPS if full else [GRADIENTS_PER_ID]:
            yield at_equal_steps(gradients_per_id, SEEDS, STEPS * (2 if full else 1))


def at_equal_time(seconds: float, *, seed: int = 0) -> Iterator[Result]:
    """Both have so many seconds; the curve is tested ten times on the way."""
    data = page_views()
    blocks, ratio = blocks_for(COST_RATIO, data)
    speed = PAPER_STEP_SECONDS / conventional_step_seconds(data, blocks)
    runners = _pair(blocks, TrainingClock(speed), seed)
    streams = [data.train.batches(BATCH, seed=seed, passes=1000) for _ in runners]
    equal_seconds(runners, streams, seconds, tests=TESTS)
    close(runners)
    setting = f"M={GRADIENTS_PER_ID}, expiry {EXPIRE_SECONDS:g} s, dense part {ratio:.0f} x the sparse part's cost"
    keep("equal_time", {"setting": setting, "curves": row_of_curves(runners)})
    gear, rival = runners
    ours, theirs = gear.curve[-1][2], rival.curve[-1][2]
    case = f"AUC after {seconds:g} s each ({gear.steps} and {rival.steps} steps), {setting}, clock x {speed:.1f}"
    name = ConventionalTrainer.name
    yield result(case, 100 * ours, name, 100 * theirs, "points", target=1.0, more_is_better=True)
    reached = next((taken for taken, _, auc in gear.curve if auc >= theirs), None)
    if reached:
        case = f"seconds to the AUC of the rival's end, {100 * theirs:.2f}; {setting}"
        yield result(case, reached, name, rival.seconds, "s")


def at_equal_steps(gradients_per_id: int, seeds: int, steps: int) -> Result:
    """The same batches for both, seed by seed; what is compared is the mean of the differences."""
    data = page_views()
    differences, curves = [], []
    for seed in range(seeds):
        clock = StepClock(PAPER_STEP_SECONDS / SPEED_UPS[gradients_per_id])
        runners = _pair(SHALLOW_BLOCKS, clock, seed, gradients_per_id)
        batches = first(data.train.batches(BATCH, seed=seed, passes=1000), steps)
        equal_steps(runners, batches, test_every=max(20, steps // 5))
        close(runners)
        differences.append(100 * (runners[0].curve[-1][2] - runners[1].curve[-1][2]))
        curves.append(row_of_curves(runners))
    setting = f"M={gradients_per_id}, expiry {EXPIRE_SECONDS:g} s"
    keep(f"equal_steps_{gradients_per_id}", {"setting": setting, "seeds": curves})
    mean = statistics.mean(differences)
    error = statistics.stdev(differences) / math.sqrt(seeds) if seeds > 1 else math.nan
    case = f"AUC after {steps} steps each, {seeds} seeds, {setting}: below the rival ({mean:+.2f} ± {error:.2f})"
    target = 1.0 if gradients_per_id == GRADIENTS_PER_ID else None
    return result(case, max(-mean, 1e-2), "allowed", ALLOWED_POINTS, "points", target=target)


def _gear(blocks: int, clock: TrainingClock, seed: int, gradients_per_id: int, ids_per_update: int) -> GearTrainer:
    return GearTrainer(
        page_views(),
        clock,
        blocks=blocks,
        expire_seconds=EXPIRE_SECONDS,
        gradients_per_id=gradients_per_id,
        ids_per_update=ids_per_update,
        seed=seed,
    )


def _pair(blocks: int, clock: TrainingClock, seed: int, gradients_per_id: int = GRADIENTS_PER_ID) -> list[Runner]:
    data = page_views()
    gear = _gear(blocks, clock, seed, gradients_per_id, BATCH)
    rival = ConventionalTrainer(data, blocks=blocks, seed=seed)
    return [Runner("gear training", gear, clock), Runner("conventional", rival, TrainingClock())]
