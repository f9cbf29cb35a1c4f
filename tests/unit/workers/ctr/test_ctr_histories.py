"""Histories that are columns: cut to their end, and the same in training, predict and serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import geartrain as gt
from geartrain.ams.values.errors import ConfigError
from geartrain.serving.folder import load_folder
from geartrain.workers import jobs
from geartrain.workers.ctr.export import export_clicks
from geartrain.workers.ctr.samples.features import latest_ids, latest_of_bags
from geartrain.workers.job.options import JobOptions
from geartrain.workers.job.state import best_snapshot
from tests.support.command_line import typed

pa = pytest.importorskip("pyarrow", reason="samples from files need the extra data")
pq = pytest.importorskip("pyarrow.parquet", reason="samples from files need the extra data")
csv = pytest.importorskip("pyarrow.csv", reason="samples from files need the extra data")
COUNT = 1200
SMALL: dict[str, Any] = {"dim": 4, "hidden": [8], "batch_size": 50, "row_lr": 0.1, "lr": 0.01, "row_weight_decay": 0.0}
HISTORIES = {"seen": {"history_of": "item"}, "seen_shop": {"history_of": "item_shop"}}
CSV_KINDS = {"seen": {"kind": "list<int64>"}, "seen_shop": {"kind": "list<int64>"}}


def clicks() -> Any:
    """A user clicks what is of the parity of the item that was seen last, and only that: the lists' ends decide."""
    random = np.random.default_rng(0)
    seen = [random.integers(20, size=random.integers(0, 6)) for _ in range(COUNT // 4)] * 4
    seen = [seen[place] for place in np.repeat(np.arange(COUNT // 4), 4)]
    item = random.integers(20, size=COUNT)
    clicked = [int(len(own) > 0 and (own[-1] + one) % 2 == 0) for own, one in zip(seen, item, strict=True)]
    return pa.table(
        {
            "user": np.repeat(np.arange(COUNT // 4), 4),
            "seen": pa.array(seen, pa.list_(pa.int64())),
            "seen_shop": pa.array([own % 2 for own in seen], pa.list_(pa.int64())),
            "item": item,
            "item_shop": item % 2,
            "click": clicked,
        }
    )


def written(folder: Path, kind: str) -> str:
    table = clicks()
    if kind == "csv":
        for name in ("seen", "seen_shop"):
            lists = ["|".join(map(str, own)) for own in table.column(name).to_pylist()]
            table = table.set_column(table.column_names.index(name), name, pa.array(lists))
        csv.write_csv(table, folder / "clicks.csv")
        return str(folder / "clicks.csv")
    pq.write_table(table, folder / "clicks.parquet", row_group_size=300)
    if kind == "trees":
        gt.compress_samples(folder / "clicks.parquet", folder / "trees", ["user", "item"], rows_per_group=300)
        return str(folder / "trees")
    return str(folder / "clicks.parquet")


def trained(out: Path, data: str, features: Any, steps: int = 200, **said: Any) -> Any:
    recipe = jobs.recipe_for("ctr", data, {**SMALL, "steps": steps, "history": 1, "features": features, **said})
    options = JobOptions(job="ctr", out=out, recipe=recipe, data=data, loggers=())
    return jobs.train(options, Console(quiet=True)).report


@pytest.mark.parametrize("model", ["din", "dien"])
@pytest.mark.parametrize("kind", ["parquet", "csv", "trees"])
def test_a_list_column_is_a_history_to_its_last_events(tmp_path: Path, kind: str, model: str) -> None:
    data = written(tmp_path, kind)
    features = {name: {**said, **CSV_KINDS[name]} for name, said in HISTORIES.items()} if kind == "csv" else HISTORIES
    report = trained(tmp_path / "run", data, features, model=model)
    assert report["held_out"]["auc"] > 0.9  # of the last event alone, which history=1 leaves

    done = typed("predict", str(tmp_path / "run"), data, "--json")
    assert done.returncode == 0, done.stderr
    scores = json.loads(done.stdout)
    if kind == "parquet":
        pytest.importorskip("onnxscript", reason="exports need the extra onnx")
        export_clicks(tmp_path / "run", tmp_path / "model", cache=tmp_path, say=lambda _: None)
        click = load_folder(tmp_path / "model").operations["click"]
        samples = [{k: v for k, v in row.items() if k != "click"} for row in clicks().slice(0, 100).to_pylist()]
        answers = click.write(click.run(click.read({"samples": samples, "explain": False})))
        np.testing.assert_allclose([one["probability"] for one in answers], scores[:100], atol=1e-4)
        assert "seen" not in (tmp_path / "model" / "examples.json").read_text()  # histories are personal


def test_a_model_without_attention_pools_the_history_over_the_rows_of_its_field(tmp_path: Path) -> None:
    trained(tmp_path / "run", written(tmp_path, "parquet"), HISTORIES, steps=2, model="deepfm")
    tables = best_snapshot(str(tmp_path / "run" / "snapshots")).manifest.tables
    names = {str(spec["name"]).rpartition("/")[2] for spec in tables}
    assert names == {"user", "item", "item_shop", "user_weight", "item_weight", "item_shop_weight"}


@pytest.mark.parametrize(
    ("features", "told"),
    [
        ({"seen": {"history_of": "itm"}}, "features.seen.history_of is 'itm'; it must be a field of one id a sample"),
        ({"user": {"history_of": "item"}}, "user.history_of is 'item', whose values are integers, and those of 'user'"),
        ({"seen": {"history_of": "item"}, "item": {"hash": "fold"}}, "hash=fold of both or of neither"),
    ],
)
def test_a_history_of_what_it_cannot_be_is_refused(tmp_path: Path, features: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told.replace(".", r"\.")):
        trained(tmp_path / "run", written(tmp_path, "parquet"), features, steps=1, model="din")


def test_the_last_ids_that_are_there_are_kept() -> None:
    bags = np.array([[1, -1, 2, 3], [4, -1, -1, -1], [-1, -1, -1, -1]])
    assert latest_ids(bags, 2).tolist() == [[2, 3], [4, -1], [-1, -1]]
    assert latest_ids(bags, 9).tolist() == [[1, 2, 3, -1], [4, -1, -1, -1], [-1] * 4]
    values, offsets = latest_of_bags(bags.reshape(-1), np.arange(4) * 4, 2)
    assert (values.tolist(), offsets.tolist()) == ([2, 3, 4], [0, 2, 3, 3])
