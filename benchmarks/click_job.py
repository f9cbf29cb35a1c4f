"""``geartrain worker ctr`` over its workers, and against a loop of one's own with the same parts.

XDL's model, samples and batches of sparse_compression.py, read as sample trees; two shards, each a process, have all
weights, and nobody waits (``mode=async``). A worker is a process of one thread of torch. Samples are those that were
committed in a while, per second that processors worked on them: in workers, shards and scheduler. Starting is not
counted; snapshots and looks at a validation do not fall into that while. The loop of one's own is :func:`train`:
``gt.TreeSamples.shared``, ``gt.EmbeddingGroup``, ``gt.attach``, restores by the scheduler, and the same network.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from _common import result
from _repeated_users import FIELDS, REPETITION, write_samples
from _up import GEARTRAIN, running_cluster
from sparse_compression import BATCH, DIM, MODEL

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.values.errors import GeartrainError
from geartrain.launch.bench import Result
from geartrain.workers.data.streams import NUM_STREAMS
from geartrain.workers.job.folder import read_run

COUNT = 500_000
WORKERS = (1, 2, 4)
SHARDS = 2
ROUNDS, SETTLE_SECONDS, SECONDS = 3, 2.0, 8.0
PATIENCE_SECONDS = 120.0
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
LR, HIDDEN = 0.003, [200, 80]
HELD_OUT = 1000
RECIPE = {
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
    "snapshots.steps": 1_000_000,
    "snapshots.minutes": 60,
}
LOOP = "a loop of one's own"


def results(full: bool = False) -> Iterator[Result]:
    """The cases of the job; ``full`` takes three times as many turns."""
    rates: dict[int | str, list[float]] = {case: [] for case in (LOOP, *WORKERS)}
    with (
        tempfile.TemporaryDirectory() as folder,
        running_cluster(SHARDS, flags=[f"--data={folder}/cluster"], settings=ONE_THREAD) as up,
    ):
        trees = write_samples(Path(folder), COUNT, REPETITION)[1]
        roles = list(up["pids"].values())
        with gt.connect(up["scheduler"]) as cluster:
            for number in range(ROUNDS * (3 if full else 1)):
                name = f"loop-{number}"
                with contextlib.ExitStack() as running:
                    loop = started(running, [sys.executable, __file__, up["scheduler"], str(trees), name])
                    rates[LOOP].append(rate(cluster, name, COUNT, [loop], roles))
                with contextlib.ExitStack() as running:
                    out = Path(folder) / f"run-{number}"
                    job = [*GEARTRAIN, "worker", "ctr", "--logger=none"]
                    first = [*job, f"--data={trees}", f"--out={out}", f"--scheduler={up['scheduler']}"]
                    workers = [started(running, [*first, *settings(RECIPE)])]
                    wait_for(lambda: (out / "snapshots").exists(), workers)  # noqa: B023
                    for count in WORKERS:
                        while len(workers) < count:
                            workers.append(started(running, [*job, f"--join={out}"]))
                        rates[count].append(rate(cluster, read_run(out).job, COUNT - HELD_OUT, workers, roles))
    found = {case: statistics.median(of) for case, of in rates.items()}
    case = f"{MODEL}, sample trees, user {REPETITION} times, batch {BATCH:,}, {SHARDS} shards, async"
    yield result(
        f"samples a processor second of the job, {case}",
        found[1], LOOP, found[LOOP], "samples/CPU s", target=0.95, more_is_better=True,
    )  # fmt: skip
    for count in WORKERS[1:]:
        yield result(
            f"samples a processor second, {count} workers, {case}",
            found[count], "one worker", found[1], "samples/CPU s", target=0.9, more_is_better=True,
        )  # fmt: skip


def settings(recipe: Mapping[str, object]) -> list[str]:
    """Flags that say them."""
    return [f"--set={key}={value}" for key, value in recipe.items()]


def started(running: contextlib.ExitStack, command: Sequence[str]) -> subprocess.Popen[bytes]:
    """A process that is ended with ``running``."""
    process = running.enter_context(
        subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, **ONE_THREAD})
    )
    running.callback(process.terminate)
    return process


def rate(
    cluster: Cluster, job: str, num_samples: int, workers: Sequence[subprocess.Popen[bytes]], roles: Sequence[int]
) -> float:
    """Samples, of ``num_samples`` in an epoch, that ``workers`` commit in a processor second of theirs and of
    ``roles``, once each of them reads and all rows are there.
    """
    streams = cluster.streams(job, worker="watch", num_streams=NUM_STREAMS)

    def committed() -> float:
        return sum(epoch * num_samples / NUM_STREAMS + place for epoch, place in streams.cursors().values())

    wait_for(lambda: committed() >= num_samples, workers)
    wait_for(lambda: len({*streams.holders().holders} - {None}) == len(workers), workers)

    def seconds() -> float:
        pids = (*(worker.pid for worker in workers), *roles)
        times = [psutil.Process(pid).cpu_times() for pid in pids]
        return sum(of.user + of.system for of in times)

    time.sleep(SETTLE_SECONDS)
    before, begun = committed(), seconds()
    time.sleep(SECONDS)
    return (committed() - before) / (seconds() - begun)


def wait_for(is_so: Callable[[], bool], workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Raise GeartrainError if one of ``workers`` ends before, or it takes too long."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        if time.monotonic() > end or any(worker.poll() is not None for worker in workers):
            raise GeartrainError(f"the workers are not at work: {[worker.poll() for worker in workers]}")
        time.sleep(0.2)


def train(address: str, trees: str, job: str) -> None:
    """The loop of one's own, without end."""
    torch.set_num_threads(1)
    samples = gt.TreeSamples(trees, batch_size=BATCH, seed=0)
    with gt.connect(address) as cluster:
        widths = dict.fromkeys(FIELDS, DIM)
        fields = gt.EmbeddingGroup(
            cluster, job, [gt.Field(name, dim=DIM) for name in FIELDS], optimizer=gt.Adam(LR), per_node=True
        )
        network = gt.models.WideDeep(widths, HIDDEN)
        dense = gt.attach(network, cluster, name=f"{job}/dense", optimizer=gt.Adam(LR))
        rows = gt.RowOptimizer(fields)
        tables = [spec.name for part in (*fields.trained, dense) for spec in part.row_placement.specs()]
        order = gt.RestoreOrder(root=f"{trees}-{job}", tables=tuple(tables), every_seconds=3600)

        def step(batch: Any) -> None:
            dense.zero_grad()
            rows.zero_grad()
            dense.refresh()
            network(fields(batch), batch["click"], batch).backward()
            dense.step()
            rows.step()

        with samples.shared(cluster, job, worker="loop", epochs=None, restore=order) as batches:
            for batch in batches:
                batches.apply(batch, partial(step, batch))


if __name__ == "__main__":
    train(*sys.argv[1:])
