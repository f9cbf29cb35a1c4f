"""A snapshot of 1M rows of 64 values with momentum: delay of writes meanwhile, and its speed to the disk.

A worker pushes 10,000 random rows again and again while the shard writes. A push's wait is the time that it took beyond
the median of those without a snapshot; its rival is the 20 ms that a step should not notice. The rates are those of all
bytes of the snapshot: on the disk, synced, beside ``dd conv=fdatasync`` of as many zeros into the same folder; and in
memory (``/dev/shm``), where no disk hides what the writing itself takes, beside ``cp`` of the same files into the same
folder. Sides take turns, and the files of each are removed before its next one.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from _common import result

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import local
from geartrain.ams.storage.snapshot.folder import prune
from geartrain.ams.values.optimizers.registry import SparseMomentum
from geartrain.launch.bench import Result

NUM_ROWS = 1_000_000
DIM = 64
PUSHED = 10_000
ROUNDS = 3
PAUSE_BUDGET_MS = 20.0
FOLDER = Path(".cache")
"""On the disk of the checkout; the system's temporary folder may be memory."""
MEMORY = Path("/dev/shm")


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench snapshot``; ``full`` takes three times as many snapshots."""
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder, local() as cluster:
        pusher = _Pusher(cluster)
        usual = statistics.median(pusher.push() for _ in range(100))
        freezes, pushes, ours, theirs, size = [], [], [], [], 0
        rounds = ROUNDS * (3 if full else 1)
        for number in range(rounds):
            started = time.perf_counter()
            pending = cluster.snapshot(folder, step=number)
            freezes.append(time.perf_counter() - started)
            while not pending.done():
                pushes.append(pusher.push() - usual)
            path = pending.result()
            ours.append(_written_alone(cluster, folder, number)[0])
            size = sum(file.stat().st_size for file in path.iterdir())
            theirs.append(_dd(Path(folder), size))
            prune(folder, 1)
        case = f"of {NUM_ROWS:,} rows of {DIM} with momentum"
        yield pause(f"freeze {case}", max(freezes))
        yield pause(f"push of {PUSHED:,} rows beside a snapshot {case}, median wait", statistics.median(pushes))
        yield pause(f"the same, 99th percentile of {len(pushes)}", sorted(pushes)[int(0.99 * len(pushes))])
        yield _rate(f"snapshot {case}, {size / 2**20:.0f} MiB, synced", size, ours, "dd conv=fdatasync", theirs)
        copies = [_beside_copy(cluster, number) for number in range(2 * rounds)]
        ours, theirs = [item for item, _ in copies], [other for _, other in copies]
        yield _rate(f"the same in memory ({MEMORY})", size, ours, "cp of the same files", theirs)


class _Pusher:
    """Pushes the same number of fresh random rows each time."""

    def __init__(self, cluster: Cluster) -> None:
        self._random = np.random.default_rng(0)
        self._table = cluster.create_table(
            "bench", dim=DIM, optimizer=SparseMomentum(lr=0.1, momentum=0.9), num_rows=NUM_ROWS
        )
        for start in range(0, NUM_ROWS, 50_000):
            ids = np.arange(start, start + 50_000)
            self._table.push(ids, self._random.standard_normal((50_000, DIM)).astype(np.float32))
        self._gradients = self._random.standard_normal((PUSHED, DIM)).astype(np.float32)

    def push(self) -> float:
        """Seconds that a push took."""
        ids = np.sort(self._random.choice(NUM_ROWS, PUSHED, replace=False))
        started = time.perf_counter()
        self._table.push(ids, self._gradients)
        return time.perf_counter() - started


def _written_alone(cluster: Cluster, folder: str, number: int) -> tuple[float, Path]:
    """Seconds of a snapshot beside no pushes, and its folder."""
    started = time.perf_counter()
    path = cluster.snapshot(folder, f"alone-{number}").result()
    return time.perf_counter() - started, path


def _beside_copy(cluster: Cluster, number: int) -> tuple[float, float]:
    """Seconds of a snapshot in memory, and of a copy of it."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        ours, path = _written_alone(cluster, folder, number)
        started = time.perf_counter()
        subprocess.run(["cp", "-r", path, Path(folder) / "copy"], check=True)
        return ours, time.perf_counter() - started


def _dd(folder: Path, size: int) -> float:
    target = folder / "zeros"
    command = ["dd", "if=/dev/zero", f"of={target}", "bs=1M", f"count={max(1, size >> 20)}", "conv=fdatasync"]
    started = time.perf_counter()
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - started
    target.unlink()
    return seconds


def _rate(case: str, size: int, ours: list[float], rival: str, theirs: list[float]) -> Result:
    """``size`` bytes in so many seconds each."""
    mine, other = (size / 2**20 / statistics.median(seconds) for seconds in (ours, theirs))
    return result(case, mine, rival, other, "MiB/s", target=0.6, more_is_better=True)


def pause(case: str, seconds: float) -> Result:
    """What a writer waits for, against what a step may wait."""
    return result(case, max(seconds * 1e3, 0.001), "budget of a step", PAUSE_BUDGET_MS, "ms", target=1.0)
