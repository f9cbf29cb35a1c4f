"""A worker that is told to stop while it waits for a role of its cluster ends soon, and says what is saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faults.children import Child, serve
from tests.support.movielens_files import write_movielens
from tests.support.refused_address import refused_address

STOPPED, LOST_CLUSTER = 3, 4
_WORKER = """
from functools import partial
from geartrain.cli.main import main
from geartrain.workers.job import interruption, job

interruption.PATIENCE_SECONDS = 0.5
job.ClientConfig = partial(job.ClientConfig, recovery_timeout_seconds={recovery_seconds})
main()
"""


@contextmanager
def worker(out: Path, films: Path, scheduler: str, recovery_seconds: float = 60.0) -> Iterator[subprocess.Popen[str]]:
    arguments = ["worker", "ctr", "--data", str(films), "--out", str(out), "--scheduler", scheduler, "--logger=none"]
    small = ["--steps=1000000", "--set=batch_size=20", "--set=dim=4", "--set=snapshots.steps=20"]
    command = [sys.executable, "-c", _WORKER.format(recovery_seconds=recovery_seconds), *arguments, *small]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if text in line:
            return said
    raise AssertionError(said)


def rest_of(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=90)
    return said


class Cluster:
    """A scheduler and two shards, processes of ours."""

    def __init__(self) -> None:
        self._scheduler = Child(serve, "scheduler", {"listen": "127.0.0.1:0", "num_shards": 2, "lease_seconds": 1.0})
        self.address: str = self._scheduler.receive()
        settings = {"scheduler": self.address, "heartbeat_seconds": 0.05}
        self.shards = [Child(serve, "server", {**settings, "shard": number}) for number in range(2)]
        for shard in self.shards:
            shard.receive()

    def end(self) -> None:
        for child in (*self.shards, self._scheduler):
            child.end()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.end()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_stop_ends_the_wait_for_a_shard(number: signal.Signals, cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with worker(out, write_movielens(tmp_path / "films"), cluster.address) as process:
        read_until(process, "step ")
        os.kill(cluster.shards[1].pid, number)
        read_until(process, "does not answer")
        process.terminate()
        said = rest_of(process)
    assert process.returncode == STOPPED, said
    assert "saved is step" in said and f"--resume {out}" in said, said


def test_a_stop_is_remembered_when_a_job_goes_back(cluster: Cluster, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with worker(out, write_movielens(tmp_path / "films"), cluster.address, recovery_seconds=2.0) as process:
        read_until(process, "step ")
        cluster.shards[1].end()
        read_until(process, "Lost a part of the cluster")
        read_until(process, "not up; waiting")
        process.terminate()
        said = rest_of(process)
    assert process.returncode == STOPPED, said
    assert f"Go on with: geartrain worker ctr --resume {out}" in said, said


def test_a_training_without_its_cluster_says_so_by_its_exit_code(tmp_path: Path) -> None:
    films = write_movielens(tmp_path / "films")
    with refused_address() as nobody, worker(tmp_path / "run", films, nobody) as process:
        said = rest_of(process)
    assert process.returncode == LOST_CLUSTER, said
