"""Roles that are ended or stopped while jobs train: servers let them save first, the scheduler keeps nobody."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import geartrain as gt
from geartrain.ams.client import cluster as cluster_module
from geartrain.ams.client import job_reporter
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.job_reporter import JobReporter
from geartrain.ams.storage.snapshot.folder import list_snapshots
from geartrain.ams.values.errors import SchedulerUnavailable
from geartrain.workers.classify.trainer import ImageTrainer
from geartrain.workers.job import snapshots
from tests.faults.test_job_recovery import STEPS, images, one_thread, train
from tests.integration.commands.test_up import up
from tests.integration.jobs.test_classify_and_predict import assert_same_models

__all__ = ["images", "one_thread"]


def test_a_rolling_restart_of_all_shards_loses_no_step(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, rolled = tmp_path / "straight", tmp_path / "rolled"
    train(straight, images)
    watches: list[JobReporter] = []
    steps: list[int] = []
    watching, whole, ends = Cluster.report_job, ImageTrainer.step, {2: "--shard=0", 12: "--shard=1"}

    def watch(self: Cluster, job: str, *told: Any) -> JobReporter | None:
        watches.append(found := watching(self, job, *told))  # type: ignore[arg-type]
        return found

    def step(self: ImageTrainer, number: int) -> torch.Tensor:
        steps.append(number)
        if shard := ends.pop(number, None):
            (server,) = (child for child in psutil.Process(running.process.pid).children() if shard in child.cmdline())
            server.terminate()
            deadline = time.monotonic() + 60
            while not watches[-1].leaving and time.monotonic() < deadline:
                time.sleep(0.01)
        return whole(self, number)

    monkeypatch.setattr(job_reporter, "_REPORT_SECONDS", 0.05)
    monkeypatch.setattr(Cluster, "report_job", watch)
    monkeypatch.setattr(ImageTrainer, "step", step)
    with up("--shards=2") as running:
        result, told = train(rolled, images, scheduler=running.facts["scheduler"], max_recoveries=0)
        running.process.terminate()
        log = running.process.communicate()[1]
    assert result.finished
    assert steps == list(range(STEPS)), told
    for at, shard in ((4, 0), (14, 1)):
        assert f"Step {at} is saved, since shard {shard} is to end; waiting for what takes its place" in told
        assert f"Going on at step {at}: 0 steps (" in told
        assert f"shard {shard} ends with its rows: 'rolled~" in log
    assert "Saved first: rolled~" in log and "What is in no snapshot is lost" in log
    assert_same_models(straight, rolled)


def test_a_training_goes_on_without_its_snapshots_while_the_scheduler_is_stopped(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watches: list[JobReporter] = []
    watching, whole = Cluster.report_job, ImageTrainer.step
    took: list[float] = []

    def watch(self: Cluster, job: str, *told: Any) -> JobReporter | None:
        watches.append(found := watching(self, job, *told))  # type: ignore[arg-type]
        return found

    def step(self: ImageTrainer, number: int) -> torch.Tensor:
        if number == 3:
            scheduler.suspend()
            began = time.monotonic()
            with pytest.raises(SchedulerUnavailable), connected.pop() as cluster:
                cluster.snapshot(tmp_path / "own")
            took.append(time.monotonic() - began)
            while watches[-1].silent_seconds <= 1.0:
                time.sleep(0.01)
        if number == 17:
            scheduler.resume()
            while watches[-1].silent_seconds:
                time.sleep(0.01)
        return whole(self, number)

    monkeypatch.setattr(job_reporter, "_REPORT_SECONDS", 0.05)
    monkeypatch.setattr(job_reporter, "_ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(snapshots, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(cluster_module, "SNAPSHOT_SECONDS", 0.5)
    monkeypatch.setattr(Cluster, "report_job", watch)
    monkeypatch.setattr(ImageTrainer, "step", step)
    with up("--shards=1") as running:
        scheduler = psutil.Process(running.facts["pids"]["scheduler"])
        connected = [gt.connect(running.facts["scheduler"])]
        result, told = train(tmp_path / "run", images, scheduler=running.facts["scheduler"], max_recoveries=0)
    assert result.finished
    for missed in (5, 10, 15):
        assert f"No snapshot of step {missed}, training goes on: the scheduler has not answered for" in told
    assert took[0] < 20  # rather than the 30 s of an attempt
    kept = [listed.name for listed in list_snapshots(tmp_path / "run" / "snapshots")]
    assert kept == [f"step-{STEPS:09}", "step-000000020"]
