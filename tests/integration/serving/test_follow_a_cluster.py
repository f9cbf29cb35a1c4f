"""A training that a scheduler knows: where its snapshots lie, and how far it is itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

import geartrain as gt
from geartrain.ams.storage.snapshot.folder import Snapshot
from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.scheduler_messages import JobReport
from geartrain.serving.live.training import ClusterJob, Training, training_of
from tests.support.role_process import RoleProcess


def step_of(training: Training) -> int | None:
    newest = training.newest()
    assert newest is None or isinstance(newest, Snapshot)
    return None if newest is None else newest.manifest.step


def wait_for(what: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_the_scheduler_says_where_snapshots_lie_and_how_far_the_job_is(tmp_path: Path) -> None:
    with RoleProcess("scheduler", "--listen", "127.0.0.1:0") as scheduler:
        address = scheduler.address
        training = training_of(address)
        assert isinstance(training, ClusterJob)
        assert step_of(training) is None
        with (
            RoleProcess("server", "--listen", "127.0.0.1:0", "--scheduler", address),
            gt.connect(address, stream="mine/rank0") as cluster,
        ):
            cluster.create_table("t", dim=2, optimizer=gt.SGD(0.1), num_rows=4)
            watch = cluster.report_job("mine", lambda: JobReport(step=17))
            assert watch is not None
            cluster.snapshot(tmp_path / "first", step=3).result()
            told = training_of(f"{address}/mine")
            wait_for(lambda: step_of(told) == 3)  # the client tells the scheduler in its own time
            progress = told.progress()
            assert progress is not None
            assert (progress.step, progress.state) == (17, "training")
            with gt.connect(address, stream="other/rank0") as another:
                another.snapshot(tmp_path / "second", step=5).result()
            wait_for(lambda: step_of(training_of(f"{address}/other")) == 5)
            with pytest.raises(ConfigError, match=rf"has snapshots of mine, other; say which: --follow {address}/JOB"):
                training.newest()
            assert step_of(told) == 3
        scheduler.process.kill()
        scheduler.process.wait()
        assert step_of(told) == 3  # what it said before holds
        assert told.progress() is None
        with pytest.raises(ConfigError, match=address):
            training_of(f"{address}/mine").newest()
