"""``geartrain worker ctr`` on a small set: it learns, goes on exactly where it stopped, and refuses what cannot be."""

from __future__ import annotations

import io
import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import geartrain as gt
from geartrain.ams.values.errors import TrainingDiverged
from geartrain.workers import jobs
from geartrain.workers.ctr.designs import crossed
from geartrain.workers.ctr.metrics import Scores, auc, calibration, grouped_auc, log_loss, measured
from geartrain.workers.ctr.recipe import MODELS, CtrRecipe, recipe_for
from geartrain.workers.ctr.samples.click_samples import PADDING
from geartrain.workers.job import job
from geartrain.workers.job.options import JobOptions, JobResult, SnapshotSettings
from geartrain.workers.job.state import newest_snapshot
from tests.integration.jobs.small_job import StopWhen
from tests.support.command_line import typed
from tests.support.movielens_files import write_movielens

QUIET = Console(quiet=True)
SMALL: dict[str, Any] = {"dim": 4, "hidden": (8,), "batch_size": 50, "steps": 60, "row_lr": 0.1}


def of(*settings: str) -> list[str]:
    return [f"--set={setting}" for setting in settings]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_movielens(tmp_path_factory.mktemp("films"))


def train(
    out: Path, data: Path | None, options: dict[str, Any] | None = None, console: Console = QUIET, **recipe: Any
) -> JobResult:
    """Of settings SMALL and those of ``recipe``, with further ``options``."""
    settings = CtrRecipe(**{"snapshots": SnapshotSettings(steps=10), **SMALL, **recipe})
    source = None if data is None else str(data)
    return jobs.train(
        JobOptions(job="ctr", out=out, recipe=settings, data=source, loggers=(), **(options or {})), console
    )


RESUME = {"resume": True}


@pytest.mark.parametrize("model", MODELS)
def test_a_run_learns_what_users_like(tmp_path: Path, data: Path, model: str) -> None:
    out = tmp_path / "run"
    small = ["--steps", "120", *of("batch_size=50", "dim=4", "row_lr=0.1", "snapshots.steps=50")]
    done = typed("worker", "ctr", "--data", str(data), "--out", str(out), *small, *of(f"model={model}", "split=time"))
    assert done.returncode == 0, done.stderr
    assert "Training" in done.stdout and "Held out: AUC" in done.stdout
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["held_out"]["auc"] > 0.95
    assert report["held_out"]["log_loss"] < report["held_out"]["log_loss_of_the_mean"] / 2
    assert report["held_out"]["grouped_auc"] > 0.9 and 0.5 < report["held_out"]["predicted_per_clicked"] < 2
    assert (report["held_out"]["samples"], report["recipe"]["model"]) == (105, model)  # an eighth chose the step
    assert (out / "calibration.png").read_bytes().startswith(b"\x89PNG")
    assert list((out / "events").rglob("events.out.tfevents.*"))


@pytest.mark.parametrize("model", ["deepfm", "dssm"])
def test_a_model_without_hidden_layers_is_trained(tmp_path: Path, data: Path, model: str) -> None:
    assert train(tmp_path / "run", data, model=model, hidden=(), steps=2).finished


def test_a_run_that_was_stopped_ends_as_one_that_was_not(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(tmp_path / "whole", data, dropout=0.2)  # of another folder: the seed alone fixes a run

    steps = iter(range(25))
    with monkeypatch.context() as patch:
        patch.setattr(job, "interruption", lambda: nullcontext(StopWhen(lambda: next(steps, None) is None)))
        stopped = train(tmp_path / "run", data, dropout=0.2)
    assert (stopped.finished, stopped.step) == (False, 25)
    before = newest_snapshot(tmp_path / "run" / "snapshots").manifest.job["phases"]
    said = io.StringIO()
    ended = train(tmp_path / "run", None, RESUME, console=Console(file=said, width=400))
    assert (ended.finished, ended.step) == (True, 60)
    assert whole.report is not None and ended.report is not None
    assert ended.report["held_out"] == whole.report["held_out"]
    assert ended.report["phases"]["steps"] > before["steps"] > 0  # of the whole run
    assert ended.report["train_seconds"] > sum(before.values())
    assert re.search(r"Trained in \d+ s \(\d+ s since step 25\), ", said.getvalue())

    further = train(tmp_path / "run", None, {"resume_steps": 7, **RESUME})
    assert further.step == 67


def test_a_run_that_diverges_says_where_and_offers_lower_rates(tmp_path: Path, data: Path) -> None:
    with pytest.raises(
        TrainingDiverged, match=r"diverged at step \d+ .* step \d+\. .* --set lr=3e\+29 --set row_lr=0\.03 "
    ):
        train(tmp_path / "run", data, lr=1e30)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (of("model=deepfn"), "model is 'deepfn'; it must be one of deepfm, wide_deep, mlp, dssm, din, dien, "),
        (of("split=user"), "split is 'user'; it must be one of random, time"),
        (of("dim=1"), "dim is 1; it must be at least 2"),
        (of("dropout=1"), "dropout is 1.0; it must lie in [0, 1)"),
        (of("row_lr=nan"), "row_lr is nan; it must be > 0"),
        (of("row_weight_decay=-1"), "row_weight_decay is -1.0; it must be >= 0"),
        (of("model=din", "history=0"), "history is 0, and din needs one"),
        (of("snapshots.minutes=0"), "snapshots.minutes is 0.0; it must be > 0"),
        (["--allow-fallback"], "give it with --resume RUN"),
        (["--data", "gone.csv"], "--data is 'gone.csv', which is not there; it must be movielens"),
        (["--data", "netflix"], "--data is 'netflix'; it must be movielens, flights, files of Parquet"),
        (of("dimm=3"), "the recipe has no key 'dimm'; did you mean 'dim'?"),
        (of("dim"), "--set 'dim' is not KEY=VALUE"),
        (of("steps=many"), "the recipe has steps = 'many': Input should be a valid integer"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, data: Path, flags: list[str], message: str) -> None:
    done = typed("worker", "ctr", "--data", str(data), "--out", str(tmp_path / "run"), *flags)
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "run" / "run.json").exists()


def test_the_run_of_another_worker_or_other_samples_is_not_gone_on_with(tmp_path: Path, data: Path) -> None:
    own = write_movielens(tmp_path / "films")
    train(tmp_path / "run", own)
    ratings = own / "ml-100k.inter"
    ratings.write_text("\n".join(ratings.read_text(encoding="utf-8").split("\n")[:100]) + "\n", encoding="utf-8")
    with pytest.raises(gt.errors.ConfigError, match="samples"):
        train(tmp_path / "run", None, RESUME)
    with pytest.raises(gt.errors.ConfigError, match="already holds a run"):
        train(tmp_path / "run", data)
    with pytest.raises(gt.errors.ConfigError, match="gone', which is not there"):  # which is told first
        train(tmp_path / "run", tmp_path / "gone")


def test_the_option_to_validate_leaves_what_is_held_out_alone(tmp_path: Path, data: Path) -> None:
    result = train(tmp_path / "run", data, validation=True, split="time")
    assert result.report is not None
    assert result.report["held_out"]["samples"] == 84


def test_settings_follow_data_model_and_split_and_what_is_given_counts_before_them() -> None:
    assert recipe_for("mine.parquet") == CtrRecipe()
    assert recipe_for("flights", model="wide_deep").split == "time"
    assert recipe_for("flights", model="wide_deep", split="random").batch_size == 4096
    assert recipe_for("mine.parquet", model="din").history > 0
    assert recipe_for("movielens", model="din", history=7, dim=8) == CtrRecipe(
        model="din", history=7, dim=8, epochs=6.0
    )
    by_time, at_random = recipe_for("movielens", split="time"), recipe_for("movielens")
    assert by_time.history == 0 < at_random.history
    assert recipe_for("movielens", split="time", fresh=True).history > 0


def test_auc_is_the_part_of_pairs_in_order_and_ties_are_half() -> None:
    rng = np.random.default_rng(0)
    scores, clicks = rng.integers(0, 6, 60) / 5, rng.integers(0, 2, 60)
    pairs = [(a, b) for a in scores[clicks == 1] for b in scores[clicks == 0]]
    assert auc(scores, clicks) == pytest.approx(np.mean([(a > b) + (a == b) / 2 for a, b in pairs]))
    assert np.isnan(auc(scores, np.ones(60)))
    assert log_loss([0.5, 0.25], [1, 0]) == pytest.approx(-(np.log(0.5) + np.log(0.75)) / 2)
    parts = calibration(scores, clicks)
    assert sum(part["samples"] for part in parts) == 60
    assert [part["predicted"] for part in parts] == sorted(part["predicted"] for part in parts)


def test_the_auc_by_user_is_the_mean_of_theirs_by_samples() -> None:
    rng = np.random.default_rng(1)
    scores, clicks, users = rng.integers(0, 6, 400) / 5, rng.integers(0, 2, 400), rng.integers(0, 30, 400) - 2**62
    clicks[users == users[0]] = 1  # who clicked on all has no AUC
    of_user = {user: auc(scores[users == user], clicks[users == user]) for user in set(users.tolist())}
    weights = [np.sum(users == user) for user in of_user if not np.isnan(of_user[user])]
    expected = np.average([found for found in of_user.values() if not np.isnan(found)], weights=weights)
    assert grouped_auc(scores, clicks, users) == pytest.approx(expected)
    assert np.isnan(grouped_auc(scores, np.zeros(400), users)) and np.isnan(auc([], []))
    assert "grouped_auc" not in measured(Scores(scores, np.ones(400), users))  # JSON has no NaN
    found = measured(Scores(scores, clicks.astype(np.float64), users))
    assert found["predicted_per_clicked"] == pytest.approx(scores.mean() / clicks.mean())
    assert measured(Scores(scores, np.zeros(400), None))["predicted_per_clicked"] is None


def test_a_cross_has_an_id_for_each_pair() -> None:
    first, second = np.arange(300).repeat(300), np.tile(np.arange(300), 300)
    ids = crossed(first, second)
    assert len(np.unique(ids)) == 300 * 300
    assert ids.min() >= 0
    bags = crossed(np.array([4, 5]), np.array([[7, PADDING], [8, 9]]))
    assert bags.shape == (2, 2)
    assert bags[0].tolist() == [crossed(np.array([4]), np.array([7]))[0], PADDING]
