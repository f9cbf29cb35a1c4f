"""A run of a click model that is killed goes on from its newest snapshot; one that loses a shard does so by itself."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from torch import Tensor

from geartrain.ams.storage.snapshot.folder import list_snapshots
from geartrain.workers import jobs
from geartrain.workers.ctr.recipe import CtrRecipe
from geartrain.workers.ctr.trainer import ClickTrainer
from geartrain.workers.job import ranks
from geartrain.workers.job.options import JobOptions, SnapshotSettings
from tests.integration.test_up import kill_child, up
from tests.support.command_line import typed
from tests.support.movielens_files import write_movielens

RECIPE = CtrRecipe(dim=4, hidden=(8,), batch_size=50, steps=30, snapshots=SnapshotSettings(steps=5), row_lr=0.1)


def test_a_killed_run_goes_on_from_its_newest_snapshot(tmp_path: Path) -> None:
    films, out = write_movielens(tmp_path / "films"), tmp_path / "run"
    settings = ["--steps=30", "--logger=none", "--set=batch_size=50", "--set=dim=4", "--set=snapshots.steps=5"]
    command = [sys.executable, "-m", "geartrain", "worker", "ctr", "--data", str(films), "--out", str(out), *settings]
    environment = {**os.environ, "GEARTRAIN_FAILPOINTS": "job.save.before=kill@4"}
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    newest = next(listed.snapshot for listed in list_snapshots(out / "snapshots") if listed.snapshot)
    assert newest.manifest.step in (10, 15)  # the third was being written
    assert not (out / "report.json").exists()
    done = typed("worker", "ctr", "--resume", str(out), "--logger=none")
    assert done.returncode == 0, done.stderr
    assert f"Going on at step {newest.manifest.step}" in done.stdout
    assert json.loads((out / "report.json").read_text(encoding="utf-8"))["steps"] == 30


def train(out: Path, films: Path, recipe: CtrRecipe = RECIPE, **more: Any) -> tuple[dict[str, Any], str]:
    told = io.StringIO()
    options = JobOptions(job="ctr", out=out, recipe=recipe, data=str(films), loggers=(), **more)
    result = jobs.train(options, Console(file=told, width=200))
    assert result.report is not None
    assert (result.finished, result.step) == (True, 30)
    return result.report, told.getvalue()


def wait_for_snapshot(root: Path, step: int) -> None:
    """It is written while the training goes on."""
    deadline = time.monotonic() + 60
    while not any(listed.snapshot and listed.snapshot.manifest.step == step for listed in list_snapshots(root)):
        assert time.monotonic() < deadline, f"there is no snapshot of step {step}"
        time.sleep(0.01)


def test_a_run_that_loses_a_shard_goes_back_and_ends_as_if_nothing_had_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks.secrets, "randbits", lambda _: 7)  # initial values depend on the tables' names
    films = write_movielens(tmp_path / "films")
    incremental = replace(RECIPE, snapshots=SnapshotSettings(steps=5, increments=2))
    straight, _ = train(tmp_path / "straight" / "run", films)
    whole, kills = ClickTrainer.step, [13]
    with up("--shards=2") as running:

        def step(self: ClickTrainer, number: int) -> Tensor:
            if kills and number == kills[0]:
                kills.pop()
                wait_for_snapshot(tmp_path / "broken" / "run" / "snapshots", 10)
                kill_child(psutil.Process(running.process.pid), "server")
            return whole(self, number)

        monkeypatch.setattr(ClickTrainer, "step", step)
        broken, told = train(tmp_path / "broken" / "run", films, incremental, scheduler=running.facts["scheduler"])
    assert "Lost a part of the cluster at step 13" in told
    assert "Going on at step 10: 3 steps (" in told, told
    assert broken["held_out"]["auc"] == pytest.approx(straight["held_out"]["auc"], abs=1e-3)
    assert broken["held_out"]["log_loss"] == pytest.approx(straight["held_out"]["log_loss"], rel=1e-3)
