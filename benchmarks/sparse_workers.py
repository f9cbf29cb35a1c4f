"""Training with sample trees against plain samples, by number of worker processes: XDL's Fig. 8.

The model, samples and batches of sparse_compression.py; two shards, each a process, have all weights. Every worker is a
process of one thread of torch that reads its own batches and waits for nobody (``mode="async"``). Samples a second are
those of the clock as far as there are cores; the shards share them. Samples per second of a processor (of workers and
shards) say what happens beyond: where they stay as they are, twice the workers on twice the cores train twice as many.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import Popen
from typing import NamedTuple

import psutil
import torch
from _calls import client_processes
from _common import result
from _repeated_users import REPETITION, write_samples
from _up import running_cluster
from sparse_compression import BATCH, COUNT, MODEL, PLAIN, Step, endless, our_step

import geartrain as gt
from geartrain.launch.bench import Result

WORKERS = (1, 2, 4, 8)
SHARDS = 2
SIDES = ("trees", "plain")
ROUNDS, SECONDS = 3, 2.0
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class Rates(NamedTuple):
    """What some workers reach together."""

    a_second: float
    """Samples, by the clock."""
    a_processor_second: float
    """Samples, of workers and shards."""
    shards_part: float
    """Of the seconds of processors, 0 to 1."""


class Turn(NamedTuple):
    """What one worker did."""

    samples: int
    seconds: float
    processor_seconds: float


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of workers of ``geartrain bench sparse``; ``full`` takes five times as many turns."""
    cores = len(os.sched_getaffinity(0))
    for workers, (trees, plain) in curve(rounds=ROUNDS * (5 if full else 1)):
        case = f"{MODEL}, user {REPETITION} times, batch {BATCH:,}, {SHARDS} shards, workers {workers}: sample trees"
        if workers <= cores:
            ours, theirs = trees.a_second, plain.a_second
            yield result(f"by the clock, {case}", ours, PLAIN, theirs, "samples/s", target=None, more_is_better=True)
        ours, theirs = trees.a_processor_second, plain.a_processor_second
        yield result(f"processors, {case}", ours, PLAIN, theirs, "samples/CPU s", target=None, more_is_better=True)


def curve(
    workers: Sequence[int] = WORKERS, *, rounds: int = ROUNDS, count: int = COUNT, batch_size: int = BATCH
) -> Iterator[tuple[int, list[Rates]]]:
    """Of each number of workers: what they reach with trees and with plain samples, the medians of turns."""
    rates: dict[tuple[int, str], list[Rates]] = {case: [] for case in itertools.product(workers, SIDES)}
    with tempfile.TemporaryDirectory() as folder, running_cluster(SHARDS, settings=ONE_THREAD) as up:
        files = write_samples(Path(folder), count, REPETITION)
        shards = [psutil.Process(up["pids"][f"server {number}"]) for number in range(SHARDS)]
        command = [sys.executable, __file__, up["scheduler"], *map(str, files), str(batch_size)]
        places = [str(number * (count // batch_size) // max(workers)) for number in range(max(workers))]
        with client_processes([[*command, place] for place in places], settings=ONE_THREAD) as clients:
            for _ in range(rounds):
                for (number, side), found in rates.items():
                    found.append(_take_turn(clients[:number], side, shards))
    for number in workers:
        yield number, [_medians(rates[number, side]) for side in SIDES]


def rates_of(turns: Sequence[Turn], shards_seconds: float) -> Rates:
    """What workers of these turns reach together; ``shards_seconds``: of processors, of all shards meanwhile."""
    processors = shards_seconds + sum(turn.processor_seconds for turn in turns)
    return Rates(
        a_second=sum(turn.samples / turn.seconds for turn in turns),
        a_processor_second=sum(turn.samples for turn in turns) / processors,
        shards_part=shards_seconds / processors,
    )


def _medians(turns: Sequence[Rates]) -> Rates:
    return Rates(*map(statistics.median, zip(*turns, strict=True)))


def _take_turn(workers: Sequence[Popen[str]], side: str, shards: Sequence[psutil.Process]) -> Rates:
    before = _processor_seconds(shards)
    for worker in workers:
        assert worker.stdin is not None
        print(side, SECONDS, file=worker.stdin, flush=True)
    turns = [Turn(*json.loads(worker.stdout.readline())) for worker in workers if worker.stdout is not None]
    return rates_of(turns, _processor_seconds(shards) - before)


def _processor_seconds(processes: Sequence[psutil.Process]) -> float:
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))


def _serve_turns(address: str, plain: str, trees: str, batch_size: int, place: int) -> None:
    """A worker: for each line, train on a side for so many seconds and print its turn. It begins at batch ``place``.

    The one at batch 0 makes the rows.
    """
    torch.set_num_threads(1)
    sources = {"trees": gt.TreeSamples(trees, batch_size=batch_size)}
    sources["plain"] = gt.ParquetSamples(plain, batch_size=batch_size)
    with gt.connect(address) as cluster:
        steps: dict[str, Step] = {
            side: our_step(cluster, side, is_split=side == "trees", with_others=True, makes_rows=place == 0)
            for side in SIDES
        }
        batches = {side: itertools.islice(endless(source, batch_size), place, None) for side, source in sources.items()}
        for side in SIDES:
            steps[side](next(batches[side]))
        print("ready", flush=True)
        for line in sys.stdin:
            side, seconds = line.split()
            began, processor, samples = time.perf_counter(), time.process_time(), 0
            while time.perf_counter() - began < float(seconds):
                steps[side](next(batches[side]))
                samples += batch_size
            turn = Turn(samples, time.perf_counter() - began, time.process_time() - processor)
            print(json.dumps(turn), flush=True)


if __name__ == "__main__":
    _serve_turns(*sys.argv[1:4], *map(int, sys.argv[4:]))
