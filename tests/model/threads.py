"""Clients at work at once: threads push, read, take snapshots, restore and make other tables, and every row adds up.

Gradients are whole numbers, so that sums are exact. A push counts for the table it was acknowledged by: the one that
was there before a restore, which is gone, or the restored one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.table import Table
from geartrain.ams.values.errors import GeartrainError, SnapshotError, TableExists, TableNotFound
from tests.integration.conftest import QUICK, ServedCluster

NUM_IDS, DIM, WRITERS = 300, 3, 4
RESTORES = 4
ALL = np.arange(NUM_IDS)


@dataclass
class Ledger:
    """What was acknowledged, by the number of the table that it was acknowledged by."""

    pushed: dict[int, np.ndarray] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, incarnation: int, ids: np.ndarray, amounts: np.ndarray) -> None:
        with self.lock:
            sums = self.pushed.setdefault(incarnation, np.zeros(NUM_IDS, np.int64))
            np.add.at(sums, ids, amounts)


class Users:
    """The threads. Each has its own random numbers; all end by their own count."""

    def __init__(self, connect: Callable[[], Cluster], root: Path, seed: int, rounds: int) -> None:
        self.connect, self.root, self.seed, self.rounds = connect, root, seed, rounds
        self.ledger = Ledger()
        self.restored: Path | None = None
        self.taken: list[Path] = []
        self.num_restored = 0
        self.failed = threading.Event()

    def run(self, work: Callable[[], None]) -> None:
        """Do it; if it fails, nobody waits for it any longer."""
        try:
            work()
        except BaseException:
            self.failed.set()
            raise

    def opened(self, cluster: Cluster) -> Table:
        """The table; waits while it is being restored."""
        for _ in range(5_000):
            if self.failed.is_set():
                break
            with contextlib.suppress(GeartrainError):
                return cluster.table("sums")
            cluster.status()  # takes its time
        raise AssertionError("the table does not come back")

    def write(self, number: int) -> None:
        random = np.random.default_rng([self.seed, number])
        with self.connect() as cluster:
            table = self.opened(cluster)
            for _ in range(self.rounds):
                ids = random.integers(0, NUM_IDS, 40)
                amounts = random.integers(1, 4, 40)
                gradients = np.repeat(-amounts[:, None], DIM, 1).astype(np.float32)
                try:
                    table.push(ids, gradients)
                except TableNotFound:
                    table = self.opened(cluster)
                    continue
                self.ledger.add(table.spec.incarnation, ids, amounts)

    def read(self) -> None:
        with self.connect() as cluster:
            table, before = self.opened(cluster), np.zeros((NUM_IDS, DIM), np.float32)
            for _ in range(2 * self.rounds):
                try:
                    rows = table.pull(ALL)
                except TableNotFound:
                    table, before = self.opened(cluster), np.zeros((NUM_IDS, DIM), np.float32)
                    continue
                assert (rows == rows[:, :1]).all(), "a torn row"
                assert (rows >= before).all(), "a row lost a write"
                before = rows

    def save(self) -> None:
        with self.connect() as cluster:
            for step in range(self.rounds // 3):
                with contextlib.suppress(SnapshotError, TableNotFound):
                    self.taken.append(Path(cluster.snapshot(self.root, step=step).result(60)))

    def restore(self) -> None:
        with self.connect() as cluster:
            while self.num_restored < RESTORES and not self.failed.is_set():
                if not self.taken:
                    cluster.status()
                    continue
                path = self.taken[-1]
                cluster.restore(path, tables=["sums"], replace=True)
                self.restored = path
                self.num_restored += 1

    def make_tables(self) -> None:
        with self.connect() as cluster:
            for number in range(self.rounds // 3):
                name = f"other-{number % 2}"
                with contextlib.suppress(TableExists):
                    cluster.create_table(name, dim=2, optimizer=gt.SGD(1.0)).push([number], np.ones((1, 2), np.float32))
                cluster.drop_table(name)


def run_threads(seed: int, folder: Path, *, rounds: int) -> None:
    """Let them work so many rounds, by random numbers of ``seed``. Raises AssertionError if the rows do not add up."""
    served = ServedCluster(2)
    try:
        _run(Users(lambda: gt.connect(served.address, config=QUICK), folder / "snapshots", seed, rounds))
    finally:
        served.stop()


def _run(users: Users) -> None:
    with users.connect() as cluster:
        cluster.create_table("sums", dim=DIM, optimizer=gt.SGD(1.0), initializer=gt.Constant(0.0), num_rows=NUM_IDS)
        writers = [partial(users.write, number) for number in range(WRITERS)]
        works = [*writers, users.read, users.save, users.restore, users.make_tables]
        with ThreadPoolExecutor(len(works)) as pool:
            for done in [pool.submit(users.run, work) for work in works]:
                done.result(120)
        table = users.opened(cluster)
        assert users.num_restored == RESTORES and users.restored is not None
        with gt.local() as other:
            other.restore(users.restored, tables=["sums"])
            base = other.table("sums").pull(ALL)[:, 0]
        expected = base + users.ledger.pushed.get(table.spec.incarnation, 0)
        np.testing.assert_array_equal(table.pull(ALL), np.repeat(expected[:, None], DIM, 1))
