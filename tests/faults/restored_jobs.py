"""A job that the scheduler restores: workers that never call restore(), killed with everything else at random moments.

Every sample adds one to its row, so that the rows say how often each is in them. Roles and workers are started again
where they die, as by ``geartrain up`` and whatever runs workers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.table import Table
from geartrain.ams.values.errors import ShardRestarted, TableNotFound, Unavailable
from tests.faults.children import Child, Supervised

SAMPLES, EPOCHS, SHARDS, WORKERS = 3_000, 2, 2, 2
ROLES = ("worker", "shard", "scheduler", "shard and scheduler", "both shards", "shard and worker")
CONFIG = gt.ClientConfig(attempt_timeout_seconds=5.0, connect_timeout_seconds=60.0, refused_timeout_seconds=60.0)
_DEADLINE_SECONDS = 120.0


def write_samples(folder: Path) -> Path:
    """Ids from 0 on, in several files."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    for number, ids in enumerate(np.array_split(np.arange(SAMPLES), 3)):
        pq.write_table(pa.table({"id": ids}), folder / f"{number}.parquet")
    return folder


def order(root: Path, table: str) -> gt.RestoreOrder:
    """Saved often, for a test."""
    return gt.RestoreOrder(root=str(root), tables=(table,), every_seconds=0.3)


def work(pipe: Connection, address: str, data: Path, root: Path, name: str, table_name: str = "counts") -> None:
    """Train on this worker's part of the samples; says how many it has applied, then "done"."""
    samples = gt.ParquetSamples(data, columns=["id"], batch_size=50, seed=3)
    done = 0
    with gt.connect(address, config=CONFIG) as cluster:
        table = _opened(cluster, table_name)
        batches = samples.shared(
            cluster,
            table_name,
            worker=name,
            epochs=EPOCHS,
            num_workers=WORKERS,
            num_streams=8,
            restore=order(root, table_name),
        )
        with batches:
            for batch in batches:
                ids = np.asarray(batch["id"])
                done += batches.apply(batch, lambda ids=ids: table.push(ids, -np.ones((len(ids), 1), np.float32)))
                pipe.send(done)
    pipe.send("done")


def _opened(cluster: Cluster, name: str) -> Table:
    """The table; one that is restored now is waited for."""
    while True:
        try:
            return cluster.create_table(
                name, dim=1, num_rows=SAMPLES, optimizer=gt.SGD(1.0), initializer=gt.Constant(0.0), reuse=True
            )
        except (TableNotFound, ShardRestarted, Unavailable):
            time.sleep(0.1)


class RestoredJob:
    """Scheduler, shards and workers as processes."""

    def __init__(self, folder: Path, stack: ExitStack, *, armed: str = "") -> None:
        """``armed``: failpoints of the scheduler's first life."""
        self._folder = folder
        settings = {"listen": "127.0.0.1:0", "num_shards": SHARDS, "data": str(folder / "scheduler")}
        settings |= {"lease_seconds": 30.0, "stream_lease_seconds": 2.0}
        self.scheduler = Supervised("scheduler", settings, armed)
        stack.callback(self.scheduler.end)
        self.shards = []
        for shard in range(SHARDS):
            self.shards.append(
                Supervised(
                    "server", {"scheduler": self.scheduler.address, "shard": shard, "heartbeat_seconds": 0.05}, ""
                )
            )
            stack.callback(self.shards[-1].end)
        self._data = write_samples(folder / "data")
        self.workers = [self._started(number) for number in range(WORKERS)]
        stack.callback(lambda: [worker.end() for worker in self.workers])

    def _started(self, number: int) -> Child:
        return Child(work, self.scheduler.address, self._data, self._folder / "snapshots", f"worker-{number}")

    def kill_worker(self, number: int) -> None:
        """Kill one and start it again."""
        self.workers[number].end()
        self.workers[number] = self._started(number)

    def await_applied(self, worker: int, samples: int) -> None:
        """Wait until a worker has applied so many batches, or is done."""
        while (said := self.workers[worker].receive(_DEADLINE_SECONDS)) != "done" and said < samples:
            pass

    def counts(self) -> np.ndarray:
        """See all workers to their end; return how often each sample is in the rows."""
        for worker in self.workers:
            try:
                while worker.receive(_DEADLINE_SECONDS) != "done":
                    pass
            except EOFError:  # its last word was heard before
                pass
            assert worker.exit_code() == 0
        while True:
            try:
                with gt.connect(self.scheduler.address, config=CONFIG) as cluster:
                    return np.asarray(_opened(cluster, "counts").pull(np.arange(SAMPLES)))[:, 0]
            except (TableNotFound, ShardRestarted, Unavailable):  # it goes back now
                time.sleep(0.1)


def run(role: str, seed: int, folder: Path) -> float:
    """Kill ``role`` at a random moment; return the seconds. Raises AssertionError if a sample is not there once an
    epoch."""
    began, chance = time.monotonic(), random.Random(seed)
    with ExitStack() as stack:
        job = RestoredJob(folder, stack)
        deaths: dict[str, Callable[[], None]] = {
            "worker": lambda: job.kill_worker(1),
            "shard": job.shards[0].kill,
            "scheduler": job.scheduler.kill,
            "shards": job.shards[1].kill,
        }
        job.await_applied(0, chance.randrange(1, SAMPLES // 80))
        time.sleep(chance.uniform(0, 0.05))  # where in a step, a snapshot, a commit
        first, _, second = role.removeprefix("both ").partition(" and ")
        deaths["shard" if first == "shards" else first]()
        if second or role == "both shards":
            time.sleep(chance.uniform(0, 1.5))  # where in the restore
            deaths[second or "shards"]()
        counts = job.counts()
    wrong = np.flatnonzero(counts != EPOCHS)
    assert not len(wrong), f"{role}, seed {seed}: {len(wrong)} samples, such as {wrong[:5]}: {counts[wrong[:5]]}"
    return time.monotonic() - began
