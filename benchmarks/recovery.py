"""Recovery time of a killed shard of 1M rows of 64 values with momentum, until it serves its snapshot's rows again.

Counted from SIGKILL: ``geartrain up`` starts it anew, it registers, its blocks are read, checked and written into a
fresh table, and a pull of 10,000 rows is answered. The rival is the budget of 10 s. The disk's share is what reading
the bytes alone takes, with nothing of them in the page cache.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
from _common import result
from _up import GEARTRAIN, started

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.cluster_status import cluster_status
from geartrain.ams.client.factory import connect
from geartrain.ams.values.errors import GeartrainError
from geartrain.ams.values.optimizers.registry import SparseMomentum
from geartrain.launch.bench import Result

NUM_ROWS = 1_000_000
DIM = 64
PULLED = 10_000
ROUNDS = 3
BUDGET_SECONDS = 10.0
FOLDER = Path(".cache")
"""On the disk of the checkout; the system's temporary folder may be memory."""


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench recovery``; ``full`` kills three times as often."""
    FOLDER.mkdir(exist_ok=True)
    command = [*GEARTRAIN, "up", "--json", "--shards=1", "--scheduler-listen=127.0.0.1:0"]
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder, started(command) as (up, facts):
        scheduler = facts["scheduler"]
        with connect(scheduler) as cluster:
            _fill(cluster)
            path = cluster.snapshot(Path(folder).absolute()).result()
        size = sum(file.stat().st_size for file in path.iterdir())
        whole, restarts, reads = [], [], []
        for _ in range(ROUNDS * (3 if full else 1)):
            reads.append(_read(path))
            _forget(path)
            restarted, back = _kill_and_restore(psutil.Process(up.pid), scheduler, path)
            restarts.append(restarted)
            whole.append(back)
    seconds, disk = statistics.median(whole), statistics.median(reads)
    rows = f"a shard of {NUM_ROWS:,} rows of {DIM} with momentum, {size / 2**20:.0f} MiB"
    yield result(f"{rows}: killed, restored, serving", seconds, "budget", BUDGET_SECONDS, "s", target=1.0)
    yield result("of that, until it was registered again", statistics.median(restarts), "the whole", seconds, "s")
    yield result(f"of that, the disk: {size / 2**20:.0f} MiB read cold and alone", disk, "the whole", seconds, "s")


def _fill(cluster: Cluster) -> None:
    table = cluster.create_table("bench", dim=DIM, optimizer=SparseMomentum(lr=0.1, momentum=0.9), num_rows=NUM_ROWS)
    random = np.random.default_rng(0)
    for start in range(0, NUM_ROWS, 50_000):
        ids = np.arange(start, start + 50_000)
        table.push(ids, random.standard_normal((50_000, DIM)).astype(np.float32))


def _kill_and_restore(up: psutil.Process, scheduler: str, path: Path) -> tuple[float, float]:
    """Seconds until the shard was registered again, and until it answered a pull of its old rows."""
    before = cluster_status(scheduler).shards[0].incarnation
    server = next(child for child in up.children() if child.status() != "zombie" and "server" in child.cmdline())
    started = time.perf_counter()
    server.kill()
    while not _is_new(scheduler, before):
        time.sleep(0.01)
    registered = time.perf_counter() - started
    with connect(scheduler) as cluster:
        cluster.restore(path, replace=True)
        cluster.table("bench").pull(np.arange(0, NUM_ROWS, NUM_ROWS // PULLED))
    return registered, time.perf_counter() - started


def _is_new(scheduler: str, before: int) -> bool:
    try:
        shard = cluster_status(scheduler).shards[0]
    except GeartrainError:
        return False
    return shard.incarnation != before and shard.state == "up"


def _read(path: Path) -> float:
    """Seconds to read all files, none of them from memory."""
    _forget(path)
    started = time.perf_counter()
    for file in path.iterdir():
        with file.open("rb", buffering=0) as opened:
            while opened.read(1 << 20):
                pass
    return time.perf_counter() - started


def _forget(path: Path) -> None:
    """Drop the files from the page cache."""
    for file in path.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
