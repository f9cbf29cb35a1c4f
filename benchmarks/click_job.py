"""``geartrain worker ctr`` against a loop of one's own with the same parts, and over its workers.

XDL's model, samples and batches of sparse_compression.py, read as sample trees; nobody waits (``mode=async``), and two
shards have all weights. Seconds are those of processors. The loop of one's own is :class:`Loop`; it and the job's
trainer take turns of steps in one process of one thread of torch, shards included. Over workers everything is a
process: samples are those that were committed in a while, per second of workers, shards and scheduler, and one worker
is measured before and after several. Starting is not counted; snapshots and looks at a validation do not fall into
that while.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from _common import median_seconds, result, threads
from _repeated_users import FIELDS, REPETITION, write_samples
from _up import GEARTRAIN, running_cluster
from rich.console import Console
from sparse_compression import BATCH, DIM, MODEL

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.values.errors import GeartrainError
from geartrain.launch.bench import Result
from geartrain.workers.ctr.recipe import recipe_for
from geartrain.workers.ctr.trainer import ClickTrainer
from geartrain.workers.data.streams import NUM_STREAMS
from geartrain.workers.job.folder import read_run
from geartrain.workers.job.options import JobOptions
from geartrain.workers.job.ranks import JobRanks
from geartrain.workers.job.state import JobProgress
from geartrain.workers.job.trainer import Attempt

COUNT, HELD_OUT = 500_000, 1000
SHARDS, WORKERS = 2, (2, 4)
ROUNDS, STEPS = 12, 20
SETTLE_SECONDS, SECONDS = 2.0, 8.0
PATIENCE_SECONDS = 120.0
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
LR, HIDDEN = 0.003, [200, 80]
RECIPE: dict[str, Any] = {
    "model": "mlp",
    "mode": "async",
    "dim": DIM,
    "hidden": HIDDEN,
    "dropout": 0.0,
    "batch_size": BATCH,
    "epochs": 1000,
    "patience": 0,
    "held_out": HELD_OUT,
    "row_weight_decay": 0.0,
}
CASE = f"{MODEL}, sample trees, user {REPETITION} times, batch {BATCH:,}, {SHARDS} shards, async"


def results(full: bool = False) -> Iterator[Result]:
    """The cases of the job; ``full`` takes three times as many turns."""
    with tempfile.TemporaryDirectory() as folder:
        _, trees = write_samples(Path(folder), COUNT, REPETITION)
        times = 3 if full else 1
        loop, job = (1e3 * seconds for seconds in step_seconds(trees, ROUNDS * times))
        yield result(f"a step of the job, processors, {CASE}", job, "a loop of one's own", loop, "ms", target=0.95)
        for count, several, one in rates_over_workers(Path(folder), trees, times):
            case = f"samples a processor second, {count} workers, {CASE}"
            yield result(case, several, "one worker", one, "samples/CPU s", target=0.9, more_is_better=True)


def step_seconds(trees: Path, rounds: int) -> tuple[float, float]:
    """Seconds of processors of a step with its batch, of the loop and of the job."""
    with threads(1), gt.local(num_shards=SHARDS) as of_loop, gt.local(num_shards=SHARDS) as of_job:
        recipe = recipe_for(None, **RECIPE)
        options = JobOptions(job="ctr", out=trees.with_name("run"), recipe=recipe, data=str(trees))
        attempt = Attempt(
            options=options,
            progress=JobProgress(step=0, stage_start=0, stage_steps=recipe.stage_steps(), table="ctr"),
            cluster=of_job,
            ranks=JobRanks(),
            console=Console(quiet=True),
        )
        loop, job = Loop(of_loop, trees), ClickTrainer(attempt, ClickTrainer.load(options, None, attempt.console))

        def run_job(steps: int) -> None:
            end = job.progress.step + steps
            job.run(stop=lambda: job.progress.step >= end)

        for run in (loop.run, run_job):
            run(COUNT // BATCH)  # all rows are there
        found = median_seconds(
            [loop.run, run_job], lambda: STEPS, rounds=rounds, calls=1, uncounted=0, clock=time.process_time
        )
        return found[0] / STEPS, found[1] / STEPS


class Loop:
    """A loop of one's own over shared samples."""

    def __init__(self, cluster: Cluster, trees: Path) -> None:
        self._fields = gt.EmbeddingGroup(
            cluster, "loop", [gt.Field(name, dim=DIM) for name in FIELDS], optimizer=gt.Adam(LR), per_node=True
        )
        self._network = gt.models.WideDeep(dict.fromkeys(FIELDS, DIM), HIDDEN)
        self._dense = gt.attach(self._network, cluster, name="loop/dense", optimizer=gt.Adam(LR))
        self._rows = gt.RowOptimizer(self._fields)
        samples = gt.TreeSamples(trees, batch_size=BATCH, seed=0)
        self._batches = samples.shared(cluster, "loop", worker="own", epochs=None)

    def run(self, steps: int) -> None:
        """Train for so many steps."""
        for _ in range(steps):
            batch = next(self._batches)
            self._dense.zero_grad()
            self._rows.zero_grad()
            self._dense.refresh()
            self._network(self._fields(batch), batch["click"], batch).backward()
            self._dense.step()
            self._rows.step()
            self._batches.commit(batch)


def rates_over_workers(folder: Path, trees: Path, rounds: int) -> Iterator[tuple[int, float, float]]:
    """Of each number of workers: samples a processor second of theirs, and of one beside them in time."""
    out = folder / "run"
    found: dict[int, list[tuple[float, float]]] = {count: [] for count in WORKERS}
    job = [*GEARTRAIN, "worker", "ctr", "--logger=none"]
    settings = [f"--set={key}={value}" for key, value in RECIPE.items()] + ["--set=snapshots.minutes=60"]
    with (
        running_cluster(SHARDS, flags=[f"--data={folder}/cluster"], settings=ONE_THREAD) as up,
        gt.connect(up["scheduler"]) as cluster,
        started([*job, f"--data={trees}", f"--out={out}", f"--scheduler={up['scheduler']}", *settings]) as first,
    ):
        wait_for(lambda: (out / "snapshots").exists(), [first])
        measured = Committed(cluster, read_run(out).job, list(up["pids"].values()))
        ones = [measured.rate([first])]
        for count in WORKERS * rounds:
            with contextlib.ExitStack() as running:
                others = [running.enter_context(started([*job, f"--join={out}"])) for _ in range(count - 1)]
                several = measured.rate([first, *others])
            ones.append(measured.rate([first]))
            found[count].append((several, statistics.mean(ones[-2:])))
    for count, rates in found.items():
        yield count, *sorted(rates, key=lambda rate: rate[0] / rate[1])[len(rates) // 2]


@contextlib.contextmanager
def started(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ended after the block."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, **ONE_THREAD}) as process:
        try:
            yield process
        finally:
            process.terminate()


class Committed:
    """What the workers of a job commit."""

    def __init__(self, cluster: Cluster, job: str, roles: Sequence[int]) -> None:
        """``roles``: processes of the cluster."""
        self._streams, self._roles = cluster.streams(job, worker="watch", num_streams=NUM_STREAMS), roles

    def rate(self, workers: Sequence[subprocess.Popen[bytes]]) -> float:
        """Samples in a second of processors of ``workers`` and roles, once all of them read and all rows are there."""
        wait_for(lambda: self._samples() > COUNT, workers)
        wait_for(lambda: len({*self._streams.holders().holders} - {None}) == len(workers), workers)
        time.sleep(SETTLE_SECONDS)
        pids = [*(worker.pid for worker in workers), *self._roles]
        samples, seconds = self._samples(), processor_seconds(pids)
        time.sleep(SECONDS)
        return (self._samples() - samples) / (processor_seconds(pids) - seconds)

    def _samples(self) -> float:
        places = self._streams.cursors().values()
        return sum(epoch * (COUNT - HELD_OUT) / NUM_STREAMS + consumed for epoch, consumed in places)


def processor_seconds(pids: Sequence[int]) -> float:
    """Of all these processes so far."""
    return sum(times.user + times.system for times in (psutil.Process(pid).cpu_times() for pid in pids))


def wait_for(is_so: Callable[[], bool], workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Raise GeartrainError if one of ``workers`` ends before, or it takes too long."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        if time.monotonic() > end or any(worker.poll() is not None for worker in workers):
            raise GeartrainError(f"the workers are not at work: {[worker.poll() for worker in workers]}")
        time.sleep(0.2)
