"""Samples are scored before they are learned from, and of those without a click only a part is, which scores undo."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from geartrain.ams.values.errors import ConfigError
from geartrain.bridge.embedding.levels import Nodes
from geartrain.workers import jobs
from geartrain.workers.ctr.batches import BatchesInMemory
from geartrain.workers.ctr.designs import Design, SampleLayout, layout_of
from geartrain.workers.ctr.export import NETWORK, export_clicks
from geartrain.workers.ctr.metrics import LatestScores, Scores, measured
from geartrain.workers.ctr.predict import predict_clicks
from geartrain.workers.ctr.recipe import CtrRecipe
from geartrain.workers.ctr.samples.negatives import learned_from
from geartrain.workers.ctr.samples.own import OwnSamples
from geartrain.workers.ctr.streamed import StreamedBatches
from geartrain.workers.ctr.trainer import ClickTrainer
from geartrain.workers.job.options import JobOptions
from geartrain.workers.job.state import JobState, best_snapshot
from geartrain.workers.samples.batches import SampleBatch

pa = pytest.importorskip("pyarrow", reason="samples from files need the extra data")
pq = pytest.importorskip("pyarrow.parquet", reason="samples from files need the extra data")
SMALL: dict[str, Any] = {"dim": 4, "hidden": (8,), "batch_size": 250, "epochs": 1.0, "lr": 0.02, "row_lr": 0.02}


def written(folder: Path, count: int = 20_000) -> str:
    """A click comes with one of forty, for some items more often."""
    random = np.random.default_rng(0)
    item, user = random.integers(8, size=count), random.integers(50, size=count)
    click = (random.random(count) < 0.004 * (1 + item * 2)).astype(np.int64)
    tags = [[int(at) % 3] * (int(at) % 4) for at in item]
    columns = {"click": click, "user": user, "item": item, "tags": tags, "at": np.arange(count)}
    pq.write_table(pa.table(columns), folder / "clicks.parquet", row_group_size=5000)
    return str(folder / "clicks.parquet")


def train(out: Path, data: str, said: io.StringIO, **recipe: Any) -> dict[str, Any]:
    settings = CtrRecipe(**{**SMALL, "features": {}, **recipe})
    options = JobOptions(job="ctr", out=out, recipe=settings, data=data, loggers=())
    report = jobs.train(options, Console(file=said, width=400)).report
    assert report is not None
    return report


def test_scores_undo_that_few_without_a_click_are_learned_from(tmp_path: Path) -> None:
    data, said, out = written(tmp_path), io.StringIO(), tmp_path / "run"
    report = train(out, data, said, negatives=0.1, epochs=8.0, progressive=4000)
    assert report["held_out"]["predicted_per_clicked"] == pytest.approx(1, abs=0.25)  # 6 if nothing undid it
    assert report["held_out"]["samples"] == 3500  # all of them
    scores = predict_clicks(out, data, cache=tmp_path, say=lambda _: None)
    clicks = pq.read_table(data)["click"].to_numpy()
    assert scores.mean() / clicks.mean() == pytest.approx(1, abs=0.25)


def test_an_exported_network_has_the_shift(tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime", reason="needs pip install 'geartrain[onnx]'")
    train(tmp_path / "run", written(tmp_path, 1000), io.StringIO(), negatives=0.125, steps=2)
    config = export_clicks(tmp_path / "run", tmp_path / "model", cache=tmp_path, say=lambda _: None)
    width = sum(feature["dim"] for feature in config["features"])
    session = ort.InferenceSession(str(tmp_path / "model" / NETWORK))
    (whole,) = session.run(["logits"], {"vectors": np.zeros((1, width), np.float32)})
    state = JobState.read(best_snapshot(tmp_path / "run" / "snapshots"), "ctr", ClickTrainer.recipe_class)
    network = Design(state.recipe, SampleLayout.from_json(state.data)).network()
    network.load_state_dict(state.tensors["network"])
    vectors = {feature["name"]: torch.zeros(1, feature["dim"]) for feature in config["features"]}
    assert whole[0] == pytest.approx(float(network.eval().logits(vectors).detach()) + np.log(0.125), abs=1e-4)


def test_the_same_samples_are_learned_from_whoever_reads_them_and_all_clicked_ones(tmp_path: Path) -> None:
    place = written(tmp_path)
    seen: list[set[int]] = []
    for batch_size in (250, 300):
        recipe = CtrRecipe(**{**SMALL, "batch_size": batch_size, "negatives": 0.1})
        samples = OwnSamples(place, times=False)
        stream = StreamedBatches(samples, recipe, Design(recipe, layout_of(samples)))
        batches = [stream.trained(step) for step in range(stream.num_trained // batch_size)]
        seen.append({int(at) for batch in batches for at in batch.ids["at"]})
        clicked = sum(float(batch.clicks.sum()) for batch in batches)
        others = sum(len(batch.clicks) for batch in batches) - clicked
        assert others == pytest.approx(0.1 * (stream.num_trained - clicked), rel=0.15)
        lengths = [batch.ids["tags"][1].diff() for batch in batches]
        assert all((of == batch.ids["item"] % 4).all() for of, batch in zip(lengths, batches, strict=True))
    assert len(seen[0] ^ seen[1]) < 60  # the ends of the epoch, which batches of 300 do not reach


def test_an_epoch_in_memory_learns_from_others_and_the_same_run_from_the_same(tmp_path: Path) -> None:
    recipe = CtrRecipe(**{**SMALL, "negatives": 0.3})
    own = OwnSamples(written(tmp_path, 5000), times=False)
    samples = StreamedBatches(own, recipe, Design(recipe, layout_of(own))).some()

    def learned(epoch: int) -> set[int]:
        batches = BatchesInMemory(samples, recipe, Design(recipe, layout_of(samples)))
        steps = batches.num_trained // 250
        found = [batches.trained(step) for step in range(epoch * steps, (epoch + 1) * steps)]
        clicked = sum(int(batch.clicks.sum()) for batch in found)
        others = {int(at) for batch in found for at in np.asarray(batch.ids["at"])[batch.clicks.numpy() == 0]}
        assert len(others) == pytest.approx(0.3 * (steps * 250 - clicked), rel=0.15)
        return others

    first, second = learned(0), learned(1)
    assert learned(0) == first
    assert len(first & second) == pytest.approx(0.3 * len(second), rel=0.3)  # 1 if nothing was drawn anew


def test_of_a_batch_without_clicks_one_sample_stays() -> None:
    ids = np.arange(20)
    assert len(learned_from([ids], np.zeros(20, np.float32), 1e-9)) == 1
    assert learned_from([ids], np.eye(20, dtype=np.float32)[3], 1e-9).tolist() == [3]


def test_samples_taken_of_a_batch_keep_the_nodes_they_have() -> None:
    columns = {"a": torch.arange(4), "u": torch.tensor([7, 8, 9])}
    batch = SampleBatch(columns, 4, {0: (0, 4)}, {"u": "user"}, {"user": Nodes(torch.tensor([0, 1, 1, 2]), 3)})
    found = batch.take(torch.tensor([0, 3]))
    assert found["u"].tolist() == [7, 9] and found.index["user"].tolist() == [0, 1] and found.cursors == {0: (0, 4)}


def test_samples_are_scored_before_they_are_learned_from(tmp_path: Path) -> None:
    said = io.StringIO()
    report = train(tmp_path / "run", written(tmp_path), said, progressive=2000, dropout=0.0, steps=60)
    found = report["progressive"]
    assert (found["samples"], found["step"]) == (2000, 60)
    assert 0.5 < found["auc"] < 0.9
    assert "on the latest 2,000 samples before they were learned from" in said.getvalue()
    # what is learned by heart is not seen there: labels that nobody can tell are guessed, though epochs know them
    assert (
        train(tmp_path / "more", written(tmp_path, 2000), io.StringIO(), progressive=500)["progressive"]["auc"] < 0.75
    )


def test_a_window_keeps_the_latest_samples_alone() -> None:
    latest = LatestScores(5)
    assert latest.joined() is None
    for first in range(0, 12, 3):
        numbers = np.arange(first, first + 3, dtype=np.float64)
        latest.add(Scores(numbers, numbers % 2, None))
    found = latest.joined()
    assert found is not None and found.probabilities.tolist() == [7, 8, 9, 10, 11]
    assert len(latest._parts) == 2


@pytest.mark.parametrize("value", [0, 1.5, -0.1, float("nan")])
def test_a_part_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"negatives is .*; it must lie in \(0, 1\], as 0.1 for every tenth"):
        CtrRecipe(negatives=value)


def test_of_equal_samples_a_part_is_learned_from(tmp_path: Path) -> None:
    item = np.repeat(np.arange(10), 2000)
    pq.write_table(pa.table({"click": np.zeros(20_000, np.int64), "item": item}), tmp_path / "few.parquet")
    samples = OwnSamples(str(tmp_path / "few.parquet"), times=False)
    recipe = CtrRecipe(**SMALL, negatives=0.5, features=samples.features({}))
    batches = StreamedBatches(samples, recipe, Design(recipe, layout_of(samples)))
    steps = range(batches.num_trained // 250)
    kept = np.bincount(np.concatenate([np.asarray(batches.trained(step).ids["item"]) for step in steps]), minlength=10)
    assert kept / batches.num_trained * 10 == pytest.approx(np.full(10, 0.5), abs=0.1)


def test_the_calibration_of_a_part_of_the_samples_is_that_of_all() -> None:
    random = np.random.default_rng(0)
    rates = random.uniform(0.02, 0.3, 200_000)
    clicks = (random.random(len(rates)) < rates).astype(float)
    kept = (clicks > 0) | (random.random(len(rates)) < 0.1)
    found = measured(Scores(rates[kept], clicks[kept], None), 0.1)["calibration"]
    assert [part["clicked"] for part in found] == pytest.approx([part["predicted"] for part in found], rel=0.1)


def test_the_auc_by_user_of_a_part_of_the_samples_weighs_users_by_all_of_theirs() -> None:
    # a user with two clicked samples and one other, AUC 1, and one with one of each, AUC 0: 5 samples, or 12 + 11
    users, clicks = np.array([1, 1, 1, 2, 2]), np.array([1.0, 1.0, 0.0, 1.0, 0.0])
    scores = Scores(np.array([0.9, 0.8, 0.1, 0.1, 0.9]), clicks, users)
    assert measured(scores)["grouped_auc"] == pytest.approx(3 / 5)
    assert measured(scores, 0.1)["grouped_auc"] == pytest.approx(12 / 23)
