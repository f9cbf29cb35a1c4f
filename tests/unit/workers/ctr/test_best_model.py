"""A run of ``geartrain worker ctr`` keeps its best model, ends early, and says of how many epochs it is."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.storage.snapshot.folder import list_snapshots
from geartrain.ams.values.scheduler_messages import JobReport
from geartrain.workers import jobs
from geartrain.workers.ctr.export import export_clicks
from geartrain.workers.ctr.predict import predict_clicks
from geartrain.workers.ctr.recipe import CtrRecipe
from geartrain.workers.ctr.samples.held_out import HeldOut
from geartrain.workers.ctr.samples.own import OwnSamples
from geartrain.workers.ctr.samples.sources import own_samples
from geartrain.workers.job import job, ranks
from geartrain.workers.job.folder import read_run
from geartrain.workers.job.options import JobOptions, JobResult, SnapshotSettings
from geartrain.workers.job.state import best_snapshot
from tests.integration.jobs.small_job import StopWhen

pa = pytest.importorskip("pyarrow", reason="samples from files need the extra data")
pq = pytest.importorskip("pyarrow.parquet", reason="samples from files need the extra data")

SAMPLES = 3000
LEARNT_BY_HEART: dict[str, Any] = {
    "dim": 8, "hidden": (16,), "batch_size": 100, "row_lr": 0.03, "row_weight_decay": 0.0, "dropout": 0.0
}  # fmt: skip
"""Settings under which a model soon knows its samples, and others worse."""


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    user, item = rng.integers(0, 150, SAMPLES), rng.integers(0, 80, SAMPLES)
    odds = rng.normal(size=150)[user] + rng.normal(size=80)[item]
    path = tmp_path_factory.mktemp("samples") / "clicks.parquet"
    click = (rng.random(SAMPLES) < 1 / (1 + np.exp(-odds))).astype(np.int64)
    pq.write_table(pa.table({"user": user, "item": item, "click": click}), path)
    return path


def train(
    out: Path, data: Path, said: io.StringIO | None = None, options: dict[str, Any] | None = None, **recipe: Any
) -> JobResult:
    settings = CtrRecipe(**{"snapshots": SnapshotSettings(steps=1000, keep=1), **LEARNT_BY_HEART, **recipe})
    given = JobOptions(job="ctr", out=out, recipe=settings, data=str(data), loggers=(), **(options or {}))
    return jobs.train(given, Console(file=said or io.StringIO(), width=400))


def test_the_best_model_is_reported_predicted_and_exported(
    tmp_path: Path, clicks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, said = tmp_path / "run", io.StringIO()
    reports: list[Callable[[], JobReport]] = []
    report_job = Cluster.report_job

    def watched(cluster: Cluster, job: str, told: Callable[[], JobReport]) -> Any:
        reports.append(told)
        return report_job(cluster, job, told)

    monkeypatch.setattr(Cluster, "report_job", watched)
    report = train(out, clicks, said, steps=300, patience=0).report
    assert report is not None and report["steps"] == 300

    looks = {
        int(step): float(found) for step, found in re.findall(r"step (\d+): validation AUC ([\d.]+)", said.getvalue())
    }
    best = max(looks, key=looks.__getitem__)
    assert len(looks) == 10 and best < 300 and looks[300] < looks[best] - 0.01
    assert (report["model"]["step"], report["model"]["best"]["step"]) == (best, best)
    assert f"The model is that of step {best}, the best: validation AUC {looks[best]:.4f}" in said.getvalue()
    shown = reports[0]()  # as top and status show it
    assert (shown.state, shown.metric) == ("ended", "best AUC")
    assert shown.metric_value == pytest.approx(looks[best], abs=6e-5)
    steps = [listed.snapshot.manifest.step for listed in list_snapshots(out / "snapshots") if listed.snapshot]
    assert steps == [300, best]  # keep=1, and the best one

    samples, parted = own_samples(str(clicks)), HeldOut(OwnSamples(str(clicks)), CtrRecipe()).parted(0)
    aucs = (looks[best], report["held_out"]["auc"])
    for part, expected in zip(map(samples.subset, parted[1:]), aucs, strict=True):
        pq.write_table(pa.table({**part.fields}), tmp_path / "part.parquet")
        told: list[str] = []
        scores = predict_clicks(out, str(tmp_path / "part.parquet"), cache=tmp_path, say=told.append)
        pairs = scores[part.clicks == 1][:, None] - scores[part.clicks == 0]
        assert expected == pytest.approx(np.mean((pairs > 0) + (pairs == 0) / 2), abs=6e-5)
        assert told == [f"The model of {out} is that of step {best}"]
    config = export_clicks(out, tmp_path / "model", cache=tmp_path, say=told.append)
    assert (config["training"]["step"], config["version"]) == (best, best)


def test_a_run_that_was_stopped_keeps_the_best_model_and_ends_as_early(
    tmp_path: Path, clicks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks.secrets, "randbits", lambda _: 7)  # initial values depend on the tables' names
    whole = train(tmp_path / "whole" / "run", clicks, steps=400).report
    assert whole is not None and whole["steps"] < 400
    best = whole["model"]["best"]["step"]
    for stop_at in (best + 1, whole["steps"] - 1):
        asked = count()
        with monkeypatch.context() as patch:
            patch.setattr(job, "interruption", lambda: nullcontext(StopWhen(lambda: next(asked) >= stop_at)))  # noqa: B023
            assert train(tmp_path / f"{stop_at}" / "run", clicks, steps=400).step == stop_at
        ended = train(tmp_path / f"{stop_at}" / "run", clicks, options={"resume": True}).report
        assert ended is not None
        assert [ended[key] for key in ("steps", "model", "held_out")] == [
            whole[key] for key in ("steps", "model", "held_out")
        ]


def test_a_run_that_ended_early_has_ended_and_a_further_stage_looks_anew(tmp_path: Path, clicks: Path) -> None:
    out, said = tmp_path / "run", io.StringIO()
    first = train(out, clicks, said, steps=400)
    run = read_run(out)
    assert run.ended and run.stage_end == first.step < 400
    assert f"Ended early, at step {first.step} of 400: no look since step " in said.getvalue()
    again = train(out, clicks, options={"continues": True}, steps=400)
    assert again.finished and again.step == first.step
    further = train(out, clicks, options={"resume": True, "resume_steps": 100})
    assert further.step > first.step + 1
    assert (
        best_snapshot(out / "snapshots").manifest.step == json.loads((out / "report.json").read_text())["model"]["step"]
    )


def test_steps_are_epochs_of_the_samples_to_train_on_and_are_said(tmp_path: Path, clicks: Path) -> None:
    said = io.StringIO()
    report = train(tmp_path / "run", clicks, said, batch_size=70, patience=0, row_lr=0.001).report
    train_samples = SAMPLES - SAMPLES // 5
    assert report is not None
    assert report["steps"] == -(-3 * train_samples // 70)
    assert report["steps_per_epoch"] == pytest.approx(train_samples / 70)
    assert report["epochs"] == pytest.approx(report["steps"] * 70 / train_samples)
    assert "Validation on 75 more samples every " in said.getvalue()
    epochs = f"{report['steps']} steps of 70 samples: 3.0 epochs, each once through the {train_samples:,} samples"
    assert said.getvalue().count(epochs) == 2  # at the start and at the end
    assert "  epoch 3.0/3.0  loss" in said.getvalue()
    shorter = train(tmp_path / "other", clicks, batch_size=70, epochs=0.5, patience=0).report
    assert shorter is not None and shorter["steps"] == -(-train_samples // 140)


def test_samples_without_any_click_are_not_validated_and_do_not_end_early(tmp_path: Path) -> None:
    users = np.arange(200)
    pq.write_table(pa.table({"user": users, "click": (users < 0).astype(np.int64)}), tmp_path / "none.parquet")
    said = io.StringIO()
    report = train(tmp_path / "run", tmp_path / "none.parquet", said, steps=40).report
    assert report is not None and (report["steps"], report["model"]) == (40, {"step": 40, "best": None})
    assert "No validation: its samples lack clicks, or others" in said.getvalue()


def test_looks_are_so_rare_that_few_samples_are_looked_at(tmp_path: Path, clicks: Path) -> None:
    said = io.StringIO()
    train(tmp_path / "run", clicks, said, steps=20, batch_size=10, patience=0)
    assert re.findall(r"step (\d+): validation", said.getvalue()) == ["20"]  # 75 samples, eight times 75 trained on
