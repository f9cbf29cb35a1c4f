"""Steps of ``geartrain worker ctr`` on Parquet files with ``prefetch=2`` and without, by the clock, in turns.

The samples and the model of ``click_job.py``, one worker (``mode=sync``) with one thread of torch and one shard in its
process. It pays where a core is idle: the line says how many processors there are, and how many were wanted just then.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from _common import median_seconds, result, threads
from _repeated_users import REPETITION, write_samples
from click_job import BATCH, CASE, RECIPE
from rich.console import Console

import geartrain as gt
from geartrain.launch.bench import Result
from geartrain.workers.ctr.recipe import recipe_for
from geartrain.workers.ctr.trainer import ClickTrainer
from geartrain.workers.job.options import JobOptions
from geartrain.workers.job.ranks import JobRanks
from geartrain.workers.job.state import JobProgress
from geartrain.workers.job.trainer import Attempt

COUNT, STEPS, AHEAD = 200_000, 50, 2


def results(full: bool = False) -> Iterator[Result]:
    """The one case; ``full`` takes three times as many turns."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.enter_context(threads(1))
        parquet, _ = write_samples(Path(folder), COUNT, REPETITION)
        runs = [steps_of(stack, parquet, prefetch) for prefetch in (AHEAD, 0)]
        for run in runs:
            run(COUNT // BATCH)  # all rows are there
        found = median_seconds(runs, lambda: STEPS, rounds=9 if full else 3, calls=1, uncounted=0)
        ahead, plain = (1e3 * seconds / STEPS for seconds in found)
        model, _, _ = CASE.partition(", sample trees")
        wanted = os.getloadavg()[0]
        case = f"a step with prefetch={AHEAD}, {model}, Parquet, {os.cpu_count()} processors, load {wanted:.1f}"
        yield result(case, ahead, "prefetch=0", plain, "ms")


def steps_of(stack: ExitStack, parquet: Path, prefetch: int) -> Callable[[int], None]:
    """Return what trains a job of its own for so many steps."""
    recipe = recipe_for(None, **{**RECIPE, "mode": "sync", "prefetch": prefetch})
    options = JobOptions(job="ctr", out=parquet.with_name(f"run-{prefetch}"), recipe=recipe, data=str(parquet))
    attempt = Attempt(
        options=options,
        progress=JobProgress(step=0, stage_start=0, stage_steps=recipe.stage_steps(), table="ctr"),
        cluster=stack.enter_context(gt.local(num_shards=1)),
        ranks=JobRanks(),
        console=Console(quiet=True),
    )
    job = ClickTrainer(attempt, ClickTrainer.load(options, None, attempt.console))

    def run(steps: int) -> None:
        end = job.progress.step + steps
        job.run(stop=lambda: job.progress.step >= end)

    return run
