"""A step's pull and push of 100,000 rows from 1, 16 and 64 shards: what more shards cost a worker.

Shards and client share this machine's cores, so the client's own CPU time (all its threads) says more than the clock.
The 16 and 64 shards are in four processes; ``--full`` gives each shard a process of its own.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np
from _calls import WAYS, draws, fill, result
from _up import running_cluster

import geartrain as gt
from geartrain.launch.bench import Result

NUM_IDS, DIM, NUM_ROWS = 100_000, 16, 1_000_000
SHARDS = (1, 16, 64)
PROCESSES = 4
ROUNDS, STEPS, UNCOUNTED = 5, 4, 1
TARGETS = {16: None, 64: round(1 / 1.5, 2)}


class Cost(NamedTuple):
    """Of one step, in ms."""

    cpu: float
    clock: float


def results(full: bool = False) -> Iterator[Result]:
    """The cases of ``geartrain bench calls`` about many shards."""
    with ExitStack() as ends:
        tables: dict[tuple[str, int], gt.Table] = {}
        for shards in SHARDS:
            of_a_process = 1 if full else max(1, shards // PROCESSES)
            settings = {"GEARTRAIN_SERVER__SHARDS": str(of_a_process)}
            up = ends.enter_context(running_cluster(shards, settings=settings))
            for way, config in WAYS.items():
                cluster = ends.enter_context(gt.connect(up["scheduler"], config=config))
                tables[way, shards] = cluster.create_table(
                    "bench", dim=DIM, optimizer=gt.SGD(lr=0.1), num_rows=NUM_ROWS, reuse=True
                )
            fill(tables[way, shards])
        costs: defaultdict[tuple[str, int], list[Cost]] = defaultdict(list)
        for number in range(ROUNDS + 1):
            for side, table in tables.items():
                taken = _steps(table)
                costs[side] += taken if number else []
    for way in WAYS:
        for shards, target in TARGETS.items():
            case = f"pull and push of {NUM_IDS:,} rows, D={DIM}, {shards} shards, {way}"
            for field, what, wanted in (("cpu", "client's CPU time", target), ("clock", "time", None)):
                ours, theirs = (
                    statistics.median(getattr(cost, field) for cost in costs[way, count]) for count in (shards, 1)
                )
                yield result(f"{case}: {what}", ours, "1 shard", theirs, "ms", target=wanted)


def _steps(table: gt.Table) -> list[Cost]:
    draw, costs = draws(NUM_ROWS, NUM_IDS, batches=STEPS), []
    out, gradients = np.empty((NUM_IDS, DIM), np.float32), np.ones((NUM_IDS, DIM), np.float32)
    for _ in range(STEPS):
        ids = draw()
        cpu, clock = time.process_time(), time.perf_counter()
        table.pull_into(ids, out)
        table.push(ids, gradients)
        costs.append(Cost((time.process_time() - cpu) * 1e3, (time.perf_counter() - clock) * 1e3))
    return costs[UNCOUNTED:]
