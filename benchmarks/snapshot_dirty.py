"""An incremental snapshot of 1M rows of 64 values with momentum, of which a share was written since its parent.

The pause is how long ``snapshot()`` keeps the step that takes it. Then a worker pushes 10,000 random rows again and
again while the shard writes; a push's wait is the time that it took beyond the median of those without a snapshot. The
rival of both is the 20 ms that a step should not notice. The size is that of all files of the snapshot, its rival 1.3
times the ids, rows and slots that were written since the parent, counted here.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _common import result
from snapshot import pause

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import local
from geartrain.ams.storage.snapshot.folder import prune
from geartrain.ams.values.optimizers.registry import SparseMomentum
from geartrain.launch.bench import Result

NUM_ROWS = 1_000_000
DIM = 64
PUSHED = 10_000
ROUNDS = {0.01: 20, 0.1: 10, 1.0: 4}
"""Snapshots by share of the rows that is dirty."""
SIZE_BUDGET = 1.3
ITEM_BYTES = 8 + 2 * 4 * DIM
"""Of an id, its row and its slot."""
FOLDER = Path(".cache")
"""On the disk of the checkout; the system's temporary folder may be memory."""


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench snapshot``; ``full`` takes three times as many snapshots."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder, local() as cluster:
        worker = _Worker(cluster)
        worker.write(1.0)
        parent = cluster.snapshot(folder, "parent").result()
        usual = statistics.median(worker.push() for _ in range(100))
        number = 0
        for share, rounds in ROUNDS.items():
            pauses, waits, sizes = [], [], []
            for _ in range(rounds * (3 if full else 1)):
                number += 1
                # What was pushed beside the last one is no part of the share.
                parent = cluster.snapshot(folder, f"between-{number}", step=number, parent=parent).result()
                worker.forget_touched()
                worker.write(share)
                touched = worker.forget_touched()
                started = time.perf_counter()
                pending = cluster.snapshot(folder, step=number, parent=parent)
                pauses.append(time.perf_counter() - started)
                while not pending.done():
                    waits.append(worker.push() - usual)
                parent = pending.result()
                sizes.append(sum(file.stat().st_size for file in Path(parent).iterdir()) / (touched * ITEM_BYTES))
            yield from _case(f"{share:.0%} of {NUM_ROWS:,} rows of {DIM} with momentum dirty", pauses, waits, sizes)
            # A new chain, so that the disk does not fill.
            parent = cluster.snapshot(folder, f"parent-{number}", step=number).result()
            prune(folder, 1)


class _Worker:
    """Pushes random rows and knows which."""

    def __init__(self, cluster: Cluster) -> None:
        self._random = np.random.default_rng(0)
        self._table = cluster.create_table(
            "bench", dim=DIM, optimizer=SparseMomentum(lr=0.1, momentum=0.9), num_rows=NUM_ROWS
        )
        self._touched = np.zeros(NUM_ROWS, np.bool_)
        self._gradients = self._random.standard_normal((PUSHED, DIM)).astype(np.float32)

    def write(self, share: float) -> None:
        """Push a share of all rows, each once."""
        ids = self._random.permutation(NUM_ROWS)[: int(share * NUM_ROWS)]
        for start in range(0, len(ids), PUSHED):
            self._push(np.sort(ids[start : start + PUSHED]))

    def push(self) -> float:
        """Seconds that a push of random rows took."""
        return self._push(np.sort(self._random.choice(NUM_ROWS, PUSHED, replace=False)))

    def forget_touched(self) -> int:
        """Return the number of rows pushed since this was called."""
        touched = int(np.count_nonzero(self._touched))
        self._touched[:] = False
        return touched

    def _push(self, ids: Any) -> float:
        self._touched[ids] = True
        started = time.perf_counter()
        self._table.push(ids, self._gradients)
        return time.perf_counter() - started


def _case(case: str, pauses: list[float], waits: list[float], sizes: list[float]) -> Iterator[Result]:
    yield pause(f"pause, {case}, median", statistics.median(pauses))
    yield pause(f"the same, 99th percentile of {len(pauses)}", _p99(pauses))
    yield pause(f"push of {PUSHED:,} rows beside it, median wait", statistics.median(waits or [0.0]))
    yield pause(f"the same, 99th percentile of {len(waits)}", _p99(waits or [0.0]))
    yield result(f"size, {case}", statistics.median(sizes), "budget", SIZE_BUDGET, "× the touched rows", target=1.0)


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(0.99 * len(seconds))]
