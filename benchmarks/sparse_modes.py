"""Two workers that do not wait for each other, against the same two step by step: the model they make, and how fast.

DeepFM on MovieLens-100K, six epochs, rows and network in a cluster of two shards; as many samples and updates on both
sides. Where one worker is slow, each of its steps takes 20 ms more.
"""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from _calls import result
from _modes_worker import WORKERS, Task, work
from _up import running_cluster

from geartrain.launch.bench import Result
from geartrain.workers.ctr.samples.movielens import find_movielens

BATCH, UPDATES = 500, 960
SLOW_SECONDS, STALENESS = 0.02, 3
CACHE = ".cache"


class Run(NamedTuple):
    """What came of a training."""

    samples_per_second: float
    auc: float


def results(full: bool = False) -> Iterator[Result]:
    """The cases of modes of ``geartrain bench sparse``; ``full`` makes three runs of each, of other seeds, and the same
    of workers that are at most some steps apart.
    """
    seeds = range(3 if full else 1)
    find_movielens(Path(CACHE), print)  # before two processes want it
    with running_cluster(2) as up:
        modes = ["sync", "async", *(["ssp"] if full else [])]
        runs = [[_run(up["scheduler"], mode, seed) for mode in modes] for seed in seeds]
    sync, *others = zip(*runs, strict=True)
    for label, own in zip(("async", f"SSP({STALENESS})"), others, strict=False):
        case, is_async = f"DeepFM on MovieLens-100K, {WORKERS} workers, one slow, {label}", label == "async"
        ours, theirs = (statistics.mean(run.samples_per_second for run in side) for side in (own, sync))
        target = 1.2 if is_async else None
        yield result(f"{case}: samples", ours, "sync", theirs, "1/s", target=target, more_is_better=True)
        ours, theirs = (statistics.mean(run.auc for run in side) for side in (own, sync))
        target = 1 - 0.003 / theirs if is_async else None
        yield result(f"{case}: AUC", ours, "sync", theirs, "", target=target, more_is_better=True)


def _run(scheduler: str, mode: str, seed: int) -> Run:
    processes = multiprocessing.get_context("spawn")
    taken, start, queue = processes.Value("q", 0), processes.Barrier(WORKERS), processes.Queue()
    with tempfile.TemporaryDirectory() as folder:
        task = Task(
            mode=mode,
            seed=seed,
            batch=BATCH,
            updates=UPDATES,
            slow_seconds=SLOW_SECONDS,
            staleness=STALENESS,
            cache=CACHE,
            scheduler=scheduler,
            meeting=str(Path(folder, "meeting")),
        )
        workers = [
            processes.Process(target=work, args=(rank, task, taken, start, queue), daemon=True)
            for rank in range(WORKERS)
        ]
        for one in workers:
            one.start()
        said = sorted(queue.get(timeout=180) for _ in workers)
        for one in workers:
            one.join()
    seconds = max(ended for _, _, ended, _ in said) - min(began for _, began, _, _ in said)
    return Run(UPDATES * BATCH / seconds, said[0][3])
