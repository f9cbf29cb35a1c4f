"""Servers that are told to end let running jobs take a snapshot first: no step is lost."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
import torch

from geartrain.ams.client import leave_watch
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.leave_watch import LeaveWatch
from geartrain.workers.job.loop import Trainer
from tests.faults.test_job_recovery import STEPS, images, one_thread, train
from tests.integration.test_classify_and_predict import assert_same_models
from tests.integration.test_up import up

__all__ = ["images", "one_thread"]


def test_a_rolling_restart_of_all_shards_loses_no_step(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, rolled = tmp_path / "straight", tmp_path / "rolled"
    train(straight, images)
    watches: list[LeaveWatch] = []
    steps: list[int] = []
    watching, whole, ends = Cluster.watch_leaves, Trainer._step, {2: "--shard=0", 12: "--shard=1"}

    def watch(self: Cluster, job: str) -> LeaveWatch | None:
        watches.append(found := watching(self, job))  # type: ignore[arg-type]
        return found

    def step(self: Trainer, number: int) -> torch.Tensor:
        steps.append(number)
        if shard := ends.pop(number, None):
            (server,) = (one for one in psutil.Process(running.process.pid).children() if shard in one.cmdline())
            server.terminate()
            deadline = time.monotonic() + 60
            while not watches[-1].leaving and time.monotonic() < deadline:
                time.sleep(0.01)
        return whole(self, number)

    monkeypatch.setattr(leave_watch, "_TELL_SECONDS", 0.05)
    monkeypatch.setattr(Cluster, "watch_leaves", watch)
    monkeypatch.setattr(Trainer, "_step", step)
    with up("--shards=2") as running:
        result, told = train(rolled, images, scheduler=running.facts["scheduler"], max_recoveries=0)
        running.process.terminate()
        log = running.process.communicate()[1]
    assert result.finished
    assert steps == list(range(STEPS)), told
    for at, shard in ((4, 0), (14, 1)):
        assert f"Step {at} is saved, since shard {shard} is to end; waiting for what takes its place" in told
        assert f"Going on at step {at}: 0 steps (" in told
        assert f"shard {shard} ends with its rows: 'rolled-" in log
    assert "Saved first: rolled-" in log and "What is in no snapshot is lost" in log
    assert_same_models(straight, rolled)
