"""Scores of further samples by a run: those that the run itself gave, histories included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import geartrain as gt
from geartrain.workers import jobs
from geartrain.workers.ctr.metrics import auc, log_loss
from geartrain.workers.ctr.predict import predict_clicks
from geartrain.workers.ctr.recipe import CtrRecipe
from geartrain.workers.ctr.samples.click_samples import PADDING, ClickSamples, part_validation, split
from geartrain.workers.ctr.samples.movielens import read_movielens
from geartrain.workers.ctr.samples.settings import FeatureSettings
from geartrain.workers.job.options import JobOptions
from tests.support.command_line import typed
from tests.support.movielens_files import WORD_OF, write_movielens

pa = pytest.importorskip("pyarrow", reason="samples from files need the extra data")
csv = pytest.importorskip("pyarrow.csv", reason="samples from files need the extra data")
pq = pytest.importorskip("pyarrow.parquet", reason="samples from files need the extra data")


def write_samples(path: Path, samples: ClickSamples, *without: str) -> None:
    """As they were read; a year that is not known is missing."""
    columns: dict[str, Any] = {"time": samples.times}
    for name, ids in samples.fields.items():
        values = [
            [WORD_OF.get(item, item) for item in bag if item != PADDING] for bag in np.atleast_2d(ids.T).T.tolist()
        ]
        columns[name] = values if samples.schema.kinds[name].is_list else [bag[0] if bag else None for bag in values]
    columns = {name: values for name, values in columns.items() if name not in without}
    pq.write_table(pa.table(columns), path)


@pytest.mark.parametrize("model", ["wide_deep", "din", "crossmedia"])
def test_a_run_scores_samples_as_it_scored_those_held_out(tmp_path: Path, model: str) -> None:
    films = write_movielens(tmp_path / "films")
    recipe = CtrRecipe(
        model=model,
        dim=4,
        hidden=(8,),
        batch_size=50,
        steps=40,
        row_lr=0.1,
        split="time",
        history=4 * (model != "wide_deep"),
    )
    options = JobOptions(job="ctr", out=tmp_path / "run", recipe=recipe, data=str(films), loggers=())
    report = jobs.train(options, Console(quiet=True)).report
    assert report is not None
    _, test = part_validation(split(read_movielens(films), "time", 0)[1], 0)
    write_samples(tmp_path / "late.parquet", test)

    done = typed("predict", str(tmp_path / "run"), str(tmp_path / "late.parquet"), "--json")
    assert done.returncode == 0, done.stderr
    scores = np.array(json.loads(done.stdout))
    assert auc(scores, test.clicks) == pytest.approx(report["held_out"]["auc"])
    assert log_loss(scores, test.clicks) == pytest.approx(report["held_out"]["log_loss"])

    out = tmp_path / "scores.parquet"
    done = typed("predict", str(tmp_path / "run"), str(tmp_path / "late.parquet"), "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert f"{len(scores):,} scores in {out}" in done.stderr.replace("\n", "")
    np.testing.assert_allclose(pq.read_table(out)["score"].to_numpy(), scores)

    done = typed("predict", str(tmp_path / "run"), str(tmp_path / "late.parquet"), "--out", "scores.csv")
    assert (done.returncode, "scores are written as Parquet; give scores.parquet" in done.stderr) == (2, True)

    for place in (tmp_path / "late.parquet", tmp_path):
        done = typed("predict", str(tmp_path / "run"), str(place), "--out", str(tmp_path / "late.parquet"))
        assert (done.returncode, "one of the samples or lies among them" in done.stderr) == (2, True)
    assert "user" in pq.read_schema(tmp_path / "late.parquet").names

    write_samples(tmp_path / "less.parquet", test, "gender")
    done = typed("predict", str(tmp_path / "run"), str(tmp_path / "less.parquet"))
    assert done.returncode == 2
    assert "has no column 'gender', which the model was trained on; it has 'user', 'item'" in done.stderr


def test_a_run_of_lists_in_csv_scores_them_in_every_kind_of_file(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    bags = [random.choice(list("abcdef"), 2, replace=False).tolist() for _ in range(600)]
    columns = {"user": np.sort(random.integers(20, size=600)), "item": random.integers(30, size=600)}
    clicks = np.array(["a" in bag for bag in bags])
    table = pa.table({**columns, "tags": bags, "click": clicks.astype(int)})
    places = [str(tmp_path / name) for name in ("clicks.csv", "clicks.parquet", "trees")]
    csv.write_csv(table.set_column(2, "tags", pa.array(["|".join(bag) for bag in bags])), places[0])
    pq.write_table(table, places[1])
    gt.compress_samples(places[1], places[2], ["user", "item"])
    recipe = CtrRecipe(
        model="deepfm",
        dim=4,
        hidden=(8,),
        batch_size=50,
        steps=60,
        row_lr=0.1,
        history=0,
        features={"tags": FeatureSettings(kind="list<string>")},
    )
    jobs.train(
        JobOptions(job="ctr", out=tmp_path / "run", recipe=recipe, data=places[0], loggers=()), Console(quiet=True)
    )
    scores = [predict_clicks(tmp_path / "run", place, cache=tmp_path, say=lambda _: None) for place in places]
    assert auc(scores[0], clicks.astype(np.float64)) > 0.9
    np.testing.assert_allclose(scores[1:], [scores[0]] * 2, rtol=1e-5)
    (tmp_path / "none.csv").write_text("user,item,tags\n")
    done = typed("predict", str(tmp_path / "run"), str(tmp_path / "none.csv"))
    assert (done.returncode, done.stdout) == (0, "") and "none.csv holds no samples" in done.stderr
