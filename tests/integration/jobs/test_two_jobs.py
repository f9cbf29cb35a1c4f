"""Two jobs on one cluster: whatever one does with its past changes nothing for the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import geartrain as gt
from geartrain.ams.values.errors import StaleClient
from tests.integration.conftest import QUICK, ServedCluster

IDS = np.arange(64)
DIM = 2


class Job:
    """Pushes ones to its own table, numbered by its steps, and knows what its rows must be."""

    def __init__(self, address: str, name: str, root: Path) -> None:
        self.name, self.root = name, root / name
        self._address = address
        self.cluster = gt.connect(address, config=QUICK, stream=f"{name}/rank0")
        self.table = self.cluster.create_table(
            name, dim=DIM, num_rows=64, optimizer=gt.SGD(1.0), initializer=gt.Constant(0.0)
        )
        self.step = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self.cluster.acknowledge(self.step)
            self.table.push(IDS, np.ones((64, DIM), np.float32), sequence=self.step)
            self.table.push(IDS, np.ones((64, DIM), np.float32))
        self.check()

    def check(self) -> None:
        np.testing.assert_array_equal(self.table.pull(IDS), np.full((64, DIM), -2 * self.step, np.float32))

    def snapshot(self, tables: list[str] | None = None) -> Path:
        return Path(self.cluster.snapshot(self.root, step=self.step, tables=tables).result(60))

    def dies(self) -> None:
        """Another process takes its place, which goes on as after a crash."""
        self.cluster.close()
        self.cluster = gt.connect(self._address, config=QUICK, stream=f"{self.name}/rank0")
        self.table = self.cluster.table(self.name)

    def goes_back(self, to: Path | None) -> None:
        """To a snapshot, or to the beginning."""
        self.dies()
        self.cluster.fence(self.name, self.cluster.write_stream.incarnation)
        if to is None:
            self.cluster.drop_table(self.name)
            self.table = self.cluster.create_table(
                self.name, dim=DIM, num_rows=64, optimizer=gt.SGD(1.0), initializer=gt.Constant(0.0)
            )
            self.step = 0
        else:
            self.step = self.cluster.restore(to, tables=[self.name], replace=True).manifest.step
            self.table = self.cluster.table(self.name)
        self.check()


@pytest.fixture
def jobs(served: Callable[..., ServedCluster], tmp_path: Path) -> Any:
    address = served(2).address
    both = Job(address, "a", tmp_path), Job(address, "b", tmp_path)
    yield both
    for job in both:
        job.cluster.close()


@pytest.mark.parametrize("tables", [["a"], None], ids=["its own tables", "all tables"])
def test_a_restore_leaves_a_job_its_numbers_that_began_anew_since(jobs: tuple[Job, Job], tables: Any) -> None:
    a, b = jobs
    a.train(3)
    b.train(20)
    path = a.snapshot(tables)
    b.goes_back(None)
    b.train(2)
    a.goes_back(path)
    b.train(5)
    a.train(5)
    b.check()


def test_a_job_does_not_notice_what_another_does_with_its_past(jobs: tuple[Job, Job]) -> None:
    a, b = jobs
    for one, other in ((a, b), (b, a)):
        one.train(4)
        other.train(7)
        path, theirs = one.snapshot([one.name]), other.snapshot([other.name])
        one.train(3)
        other.train(1)
        for event in (
            one.dies,
            lambda one=one, path=path: one.goes_back(path),
            lambda one=one: one.goes_back(None),
            lambda one=one, path=path: one.goes_back(path),
        ):
            event()
            other.train(2)
            one.train(3)
        other.goes_back(theirs)
        for job in (one, other):
            job.train(2)
            job.check()
    stopped = gt.connect(a._address, config=QUICK, stream="a/rank0")
    a.goes_back(None)
    with stopped, pytest.raises(StaleClient):
        stopped.table("a").push(IDS, np.ones((64, DIM), np.float32), sequence=1)
    a.train(1)
    b.train(1)
