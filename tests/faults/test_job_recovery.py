"""A job whose cluster loses a role goes back to its last snapshot by itself, and ends as if nothing had happened."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import geartrain as gt
from geartrain.ams.client.cluster_status import cluster_status
from geartrain.ams.storage.snapshot.folder import list_snapshots
from geartrain.ams.values import errors
from geartrain.ams.values.config import ClientConfig
from geartrain.workers.classify.report import Evaluation
from geartrain.workers.classify.trainer import ImageTrainer
from geartrain.workers.job import job
from geartrain.workers.job.options import JobResult, SnapshotSettings
from geartrain.workers.recipes.recipe import ClassifyRecipe
from tests.integration.commands.test_up import kill_child, up
from tests.integration.conftest import ServedCluster
from tests.integration.jobs.small_job import classify
from tests.integration.jobs.test_classify_and_predict import RECIPE, assert_same_models, draw_shapes, one_thread
from tests.support.command_line import typed
from tests.support.refused_address import refused_address

__all__ = ["one_thread"]
STEPS = 24
JOB = replace(RECIPE, steps=STEPS, batch_size=4, sample_rate=0.75, row_momentum=0.9)
JOB = replace(JOB, snapshots=SnapshotSettings(steps=5))
INCREMENTAL = replace(JOB, snapshots=SnapshotSettings(steps=5, increments=3))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return draw_shapes(tmp_path / "images", 4)


def train(out: Path, images: Path | None, recipe: ClassifyRecipe = JOB, **changes: Any) -> tuple[JobResult, str]:
    told = io.StringIO()
    return classify(out, images, recipe, told, **changes), told.getvalue()


@contextmanager
def served() -> Iterator[str]:
    """Address of a cluster of this process, behind sockets: for what is not about its processes."""
    cluster = ServedCluster()
    try:
        yield cluster.address
    finally:
        cluster.stop()


def assert_noted(scheduler: str, told: str) -> None:
    """The scheduler knows what became of a job of which a server was killed, and which ``told`` the same to people."""
    (known,) = json.loads(typed("status", "--json", f"--scheduler={scheduler}").stdout)["jobs"]
    assert (known["state"], known["step"], known["snapshot_step"]) == ("ended", STEPS, STEPS)
    assert known["recoveries"] == 1
    assert f": {known['steps_lost']} steps (" in told
    said = typed("events", "--json", "--since=0", f"--scheduler={scheduler}").stdout
    kinds = [kind for line in said.splitlines() if (kind := json.loads(line)["kind"]) != "schema"]
    assert kinds[kinds.index("lost") :][:4] == ["lost", "back", "restore", "recovery"]
    assert kinds.count("snapshot") >= 3
    assert kinds[-1] == "job_ended"


@pytest.mark.parametrize("role", ["server", "scheduler"])
def test_a_job_survives_the_death_of_a_role(
    role: str, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    train(straight, images)
    with up("--shards=2") as running:
        parent, whole, kills = psutil.Process(running.process.pid), ImageTrainer.step, [13]

        def step(self: ImageTrainer, number: int) -> torch.Tensor:
            if kills and number == kills[0]:
                kills.pop()
                kill_child(parent, role)
            return whole(self, number)

        monkeypatch.setattr(ImageTrainer, "step", step)
        result, told = train(broken, images, INCREMENTAL, scheduler=running.facts["scheduler"])
        if role == "server":
            assert_noted(running.facts["scheduler"], told)
    parents = [listed.snapshot.manifest.parent for listed in list_snapshots(broken / "snapshots") if listed.snapshot]
    assert any(parents) and not all(parents)
    assert result.finished
    assert result.step == STEPS
    if role == "server":
        assert "Going on at step 10: 3 steps (" in told, told
    assert_same_models(straight, broken)


def test_a_shard_that_is_back_before_the_next_snapshot_is_missed_all_the_same(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, kills = ImageTrainer.step, [9]

    def step(self: ImageTrainer, number: int) -> torch.Tensor:
        loss = whole(self, number)
        if kills and number == kills[0]:
            kills.pop()
            while not list_snapshots(tmp_path / "run" / "snapshots"):  # else that of step 10 would wait for it
                assert running.process.poll() is None
                time.sleep(0.05)
            before = cluster_status(running.facts["scheduler"]).shards[0].incarnation
            kill_child(psutil.Process(running.process.pid), "server")
            while True:  # its tables lack rows, so that the cluster is not ready
                (now,) = cluster_status(running.facts["scheduler"]).shards
                if now.state == "up" and now.incarnation != before:
                    break
        return loss

    monkeypatch.setattr(ImageTrainer, "step", step)
    # No later model is better, so that what the job does next is a snapshot.
    monkeypatch.setattr(Evaluation, "quick_test", lambda _, step, __: (-float(step), 1))
    with up("--shards=1") as running:
        result, told = train(tmp_path / "run", images, scheduler=running.facts["scheduler"])
    assert result.finished
    assert "No snapshot of step 10" in told
    assert "Going on at step 5: 5 steps (" in told, told


def test_a_job_that_never_began_goes_back_to_no_earlier_run(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "run", images)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    tried: list[bool] = []
    whole = job.connect

    def connecting(address: str, **_: Any) -> Any:
        tried.append(True)
        return whole(address, config=ClientConfig(connect_timeout_seconds=0.2))

    monkeypatch.setattr(job, "connect", connecting)
    with refused_address() as nobody, pytest.raises(errors.SchedulerUnavailable):
        train(tmp_path / "run", images, scheduler=nobody, overwrite=True)
    assert len(tried) == 1
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_a_job_that_has_ended_its_training_does_not_train_on(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, whole, answers, losses = tmp_path / "run", ImageTrainer.step, Evaluation.answers, [7, STEPS]

    def step(self: ImageTrainer, number: int) -> torch.Tensor:
        if losses[:1] == [number]:
            losses.pop(0)
            raise errors.ShardRestarted("shard 0 was restarted")
        return whole(self, number)

    def evaluate(self: Evaluation, number: int, model: Any = None) -> Any:
        if losses[:1] == [number]:
            losses.pop(0)
            raise errors.ShardRestarted("shard 0 was restarted")
        return answers(self, number, model)

    monkeypatch.setattr(ImageTrainer, "step", step)
    monkeypatch.setattr(Evaluation, "answers", evaluate)
    with served() as scheduler:
        result, told = train(out, images, scheduler=scheduler)
        assert (result.step, result.finished) == (STEPS, True)
        assert f"Going on at step {STEPS}: 0 steps (" in told
        assert list_snapshots(out / "snapshots")[0].name == f"step-{STEPS:09}"

        losses.append(STEPS)  # before the first snapshot of the next stage
        result, told = train(out, images, scheduler=scheduler, resume=True, resume_steps=4)
        assert result.step == STEPS + 4
        assert f"Lost a part of the cluster at step {STEPS}" in told


def test_a_job_that_may_not_go_back_says_what_was_lost(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: Any) -> torch.Tensor:
        raise errors.ShardRestarted("shard 1 was restarted")

    monkeypatch.setattr(ImageTrainer, "step", lost)
    with served() as scheduler, pytest.raises(errors.ShardRestarted):
        train(tmp_path / "run", images, scheduler=scheduler, max_recoveries=2)


def test_a_worker_whose_job_was_taken_over_neither_trains_on_nor_saves(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ImageTrainer.step

    def stopped(at: int) -> Callable[[ImageTrainer, int], torch.Tensor]:
        def step(self: ImageTrainer, number: int) -> torch.Tensor:
            loss = whole(self, number)
            if number == at:  # another process resumes the job while this one stands still
                while not any(
                    listed.name == f"step-{5:09}" for listed in list_snapshots(tmp_path / f"run-{at}" / "snapshots")
                ):
                    time.sleep(0.01)  # it is written beside the steps
                with gt.connect(scheduler) as successor:
                    successor.fence(self.head.name, time.time_ns())
            return loss

        return step

    with served() as scheduler:
        # 7: the next thing it does is a push. 9: it is a snapshot, which would hold this backbone and the rows of the
        # successor.
        for at, kept in ((7, 5), (9, 5)):
            monkeypatch.setattr(ImageTrainer, "step", stopped(at))
            with pytest.raises(errors.StaleClient, match="another process writes in its place"):
                train(tmp_path / f"run-{at}", images, scheduler=scheduler)
            newest = list_snapshots(tmp_path / f"run-{at}" / "snapshots")[0]
            assert newest.name == f"step-{kept:09}"
