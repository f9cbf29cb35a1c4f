"""A training step through ``gt.prefetch``, depth 2, beside the longest of its stages and beside the plain loop.

26 fields of 1 M ids with Zipf keys, D = 16, batch 4,096, Adagrad, all in this process. Either everything is CPU: the
loader draws the ids, and an MLP 200-80-1 with Adam is computed by one thread of torch. Or the loader waits for a disk
and the loop for a device, 40 ms each. The stages are timed in the plain loop, which takes turns with the others. No
step can be shorter than the longest stage, or than the CPU seconds of all stages over the cores; with ``staleness=0``
compute and push are one stage, for the next batch cannot be handed out before the push.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from _common import result, threads
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.table import Table
from geartrain.launch.bench import Result

FIELDS, IDS, DIM, BATCH, DEPTH = 26, 1_000_000, 16, 4096, 2
CALLS, UNCOUNTED, ROUNDS = 24, 6, 5
WAIT_SECONDS = 0.04
LATE = DEPTH + 1
"""A staleness with which hardly a row is pulled again."""
TARGET = 1 / 1.15
NAMES = [f"f{n}" for n in range(FIELDS)]
Batch = dict[str, Tensor]
Times = dict[str, list[float]]


def results(full: bool = False) -> Iterator[Result]:
    """Yield the pipeline cases of ``geartrain bench sparse``; ``full`` takes four times as many turns."""
    with threads(1), gt.local() as cluster:
        for waits in (False, True):
            yield from _cases(_Job(cluster, waits), ROUNDS * (4 if full else 1))


def _cases(job: _Job, rounds: int) -> Iterator[Result]:
    stages: Times = defaultdict(list)
    steps: dict[int | None, list[float]] = {None: [], 0: [], LATE: []}
    job.plain(stages)  # not counted
    stages.clear()
    for _ in range(rounds):
        steps[None] += job.plain(stages)
        for staleness in (0, LATE):
            steps[staleness] += job.ahead(staleness)
    seconds = {name: statistics.median(each) for name, each in stages.items()}
    per_core = seconds["cpu"] / len(os.sched_getaffinity(0))
    print(", ".join(f"{name} {1e3 * each:.1f} ms" for name, each in seconds.items()))
    kind = "disk and device" if job.waits else "CPU"
    case = f"a step through gt.prefetch, {kind}, {FIELDS} fields, D={DIM}, batch {BATCH:,}, depth {DEPTH}"
    bounds = {
        0: max(seconds["read"], seconds["look-up"], seconds["compute"] + seconds["push"], per_core),
        LATE: max(seconds["read"], seconds["look-up"], seconds["compute"], seconds["push"], per_core),
    }
    for staleness, bound in bounds.items():
        ours = 1e3 * statistics.median(steps[staleness])
        rival = "the longest stage, or CPU seconds / cores"
        yield result(f"{case}, staleness {staleness}", ours, rival, 1e3 * bound, "ms", target=TARGET)
        plain = 1e3 * statistics.median(steps[None])
        yield result(f"{case}, staleness {staleness}", ours, "the plain loop", plain, "ms", target=None)


class _Job:
    def __init__(self, cluster: Cluster, waits: bool) -> None:
        self.waits = waits
        self._fields = gt.EmbeddingGroup(
            cluster, "bench", [gt.Field(name, dim=DIM) for name in NAMES], optimizer=gt.Adagrad(0.05), reuse=True
        )
        for name in NAMES:
            _fill(self._fields.table(name))
        self._rows = gt.RowOptimizer(self._fields)
        self._network = nn.Sequential(
            nn.Linear(FIELDS * DIM, 200), nn.ReLU(), nn.Linear(200, 80), nn.ReLU(), nn.Linear(80, 1)
        )
        self._adam = torch.optim.Adam(self._network.parameters())
        self._random = np.random.default_rng(0)
        ranks = 1.0 / np.arange(1, IDS + 1)
        self._zipf = np.cumsum(ranks / ranks.sum())
        self._drawn = [self._draw() for _ in range(CALLS)]

    def _draw(self) -> Batch:
        ids = (np.minimum(np.searchsorted(self._zipf, self._random.random(BATCH)), IDS - 1) for _ in NAMES)
        return dict(zip(NAMES, map(torch.from_numpy, ids), strict=True))

    def _loader(self) -> Iterator[Batch]:
        for drawn in self._drawn:
            if self.waits:
                time.sleep(WAIT_SECONDS)
            yield drawn if self.waits else self._draw()

    def plain(self, stages: Times) -> list[float]:
        """Seconds of a step, and of its stages."""
        taken, loader = [], self._loader()
        for number in range(CALLS):
            marks, cpu = [time.perf_counter()], time.process_time()
            batch = next(loader)
            marks.append(time.perf_counter())
            vectors = self._fields(batch)
            marks.append(time.perf_counter())
            self._compute(vectors)
            marks.append(time.perf_counter())
            self._push()
            marks.append(time.perf_counter())
            if number < UNCOUNTED:
                continue
            taken.append(marks[-1] - marks[0])
            for name, begun, ended in zip(("read", "look-up", "compute", "push"), marks, marks[1:], strict=False):
                stages[name].append(ended - begun)
            stages["cpu"].append(time.process_time() - cpu)
        return taken

    def ahead(self, staleness: int) -> list[float]:
        """Seconds of a step through a pipeline."""
        taken, last = [], time.perf_counter()
        loop: Any = gt.prefetch(self._loader(), self._fields, depth=DEPTH, staleness=staleness)
        for _, vectors in loop:
            self._compute(vectors)
            self._push()
            now = time.perf_counter()
            taken.append(now - last)
            last = now
        return taken[UNCOUNTED:-DEPTH]  # the last ones have nothing to read beside them

    def _compute(self, vectors: Batch) -> None:
        if self.waits:
            torch.stack([vector.sum() for vector in vectors.values()]).sum().backward()
            time.sleep(WAIT_SECONDS)
            return
        loss = self._network(torch.cat(list(vectors.values()), 1)).square().mean()
        self._adam.zero_grad()
        loss.backward()
        self._adam.step()

    def _push(self) -> None:
        self._rows.step()
        self._rows.zero_grad()


def _fill(table: Table) -> None:
    """Make every row, so that none is created during a timing."""
    for start in range(0, IDS, 100_000):
        table.push(np.arange(start, start + 100_000), np.full((100_000, DIM), 1e-3, np.float32))
