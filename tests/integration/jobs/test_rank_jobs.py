"""Jobs whose class rows lie on their ranks: no cluster, one snapshot, any number of processes."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from geartrain.ams.storage.snapshot.folder import latest, list_snapshots
from geartrain.ams.values.errors import ConfigError
from geartrain.bridge.rows.serialization import state_from_bytes
from geartrain.workers.job import job, trainer
from geartrain.workers.job.options import SnapshotSettings
from geartrain.workers.recipes.recipe import ClassifyRecipe
from tests.faults.test_elastic import torchrun
from tests.faults.test_job_recovery import JOB, images
from tests.integration.jobs.small_job import classify, stop_after
from tests.integration.jobs.test_classify_and_predict import assert_same_state, one_thread

__all__ = ["images", "one_thread"]
STEPS = 12
RANKS = replace(JOB, steps=STEPS, rows="ranks", margin="cosface:2,0.2", lr=0.02)
"""With a loss that stays far from 0."""


def train(out: Path, images: Path, *, finishes: bool = True, recipe: ClassifyRecipe = RANKS, **changes: Any) -> str:
    told = io.StringIO()
    assert classify(out, images, recipe, told, **changes).finished == finishes
    return told.getvalue()


def losses(run: Path) -> dict[int, float]:
    """Step -> loss, as logged."""
    (events,) = (run / "events").iterdir()
    return {event.step: event.value for event in EventAccumulator(str(events)).Reload().Scalars("train/loss")}


def test_two_ranks_that_died_go_on_as_one_with_the_losses_of_a_run_that_never_stopped(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "SHOW_EVERY", 1)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(whole, images)
    with pytest.raises(ChildFailedError):
        torchrun(2, None, images, broken, STEPS, "1:8", False, RANKS)
    saved = latest(broken / "snapshots").manifest.job
    assert (saved["world_size"], saved["progress"]["step"]) == (2, 5)  # type: ignore[index,call-overload]

    assert "Going on at step 5" in train(broken, images, resume=True)
    expected, found = losses(whole), losses(broken)
    steps = range(6, STEPS + 1)
    assert min(expected.values()) > 0.1
    np.testing.assert_allclose([found[step] for step in steps], [expected[step] for step in steps], rtol=1e-4)


def test_two_ranks_keep_the_best_model_and_finish(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    told = torchrun(2, None, images, out, STEPS, "never", False, RANKS)
    assert "The model is that of step" in told or "Training did not help" in told
    assert (out / "report.json").exists() and (out / "model").is_dir()
    assert latest(out / "snapshots").manifest.step == STEPS
    assert len(list_snapshots(out / "snapshots")) == 2  # keep_snapshots


def test_a_stopped_run_goes_on_to_the_bit_and_its_rows_may_move_to_a_cluster_and_back(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(whole, images)
    with monkeypatch.context() as patched:
        patched.setattr(job, "interruption", stop_after(7))
        assert "Stopped at step 7 and saved" in train(stopped, images, finishes=False)
    train(stopped, images, resume=True)
    assert_same_state(whole, stopped)
    for rows in ("pull", "ranks"):
        train(stopped, images, recipe=replace(RANKS, rows=rows), stated=("rows",), resume=True, resume_steps=1)
    assert latest(stopped / "snapshots").manifest.step == STEPS + 2


def test_sparsified_gradients_go_on_from_a_snapshot_on_any_number_of_ranks(images: Path, tmp_path: Path) -> None:
    sparse = replace(RANKS, sparsity=0.99, warmup_steps=2)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    torchrun(2, None, images, whole, STEPS, "never", False, sparse)
    torchrun(2, None, images, broken, STEPS, "1:8", False, sparse, restarts=1)
    assert_same_state(whole, broken)
    state = state_from_bytes(latest(broken / "snapshots").job_files()["training.safetensors"])["gradients"]
    assert state["steps"] == STEPS
    assert any(bool(residual.any()) for residual in state["residual"].values())

    torchrun(4, None, images, broken, 3, "never", False, sparse, True)
    job = latest(broken / "snapshots").manifest.job
    assert (job["world_size"], job["progress"]["step"]) == (4, STEPS + 3)  # type: ignore[index,call-overload]
    with pytest.raises(ConfigError, match=r"sparsity is 0\.99, and one process sends no gradients; start several"):
        train(broken, images, resume=True, resume_steps=1)


def test_flags_of_a_cluster_are_refused_before_anything_is_written(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(ConfigError, match=r"--scheduler, snapshots\.increments are for rows in a cluster.*--rows pull"):
        train(out, images, scheduler="127.0.0.1:1", recipe=replace(RANKS, snapshots=SnapshotSettings(increments=2)))
    assert not out.exists()
