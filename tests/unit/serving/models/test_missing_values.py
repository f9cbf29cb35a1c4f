"""A model of samples that lack values: trained, gone on with, scored and asked alike; and columns named as ours are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import geartrain as gt
from geartrain.serving.folder import load_folder
from geartrain.workers import jobs
from geartrain.workers.ctr.export import export_clicks
from geartrain.workers.ctr.recipe import CtrRecipe
from geartrain.workers.job.options import JobOptions
from tests.support.command_line import typed
from tests.support.served_models import require_onnx

pa = pytest.importorskip("pyarrow", reason="samples from files need the extra data")
pq = pytest.importorskip("pyarrow.parquet", reason="samples from files need the extra data")
SMALL: dict[str, Any] = {"dim": 4, "hidden": (8,), "batch_size": 20, "steps": 20, "row_lr": 0.1}


def samples(count: int) -> list[dict[str, Any]]:
    """Of each kind of column some values are missing; and there are columns that are named as what we add."""
    random = np.random.default_rng(3)

    def some(value: Any) -> Any:
        return None if random.random() < 0.3 else value

    return [
        {
            "user": some(int(random.integers(5))),
            "item": some(f"i{random.integers(5)}"),
            "flag": some(bool(random.integers(2))),
            "words": some([f"w{random.integers(3)}", None]),
            "history": some([int(number) for number in random.integers(9, size=2)]),
            "user_weight": some(int(random.integers(5))),
            "history_items": some(int(random.integers(5))),
            "history_outcomes": some(int(random.integers(5))),
        }
        for _ in range(count)
    ]


def trained(folder: Path, rows: list[dict[str, Any]], **options: Any) -> Any:
    given = {"data": str(folder / "clicks.parquet")} if not options else {}
    table = pa.Table.from_pylist([{**row, "click": number % 2, "time": number} for number, row in enumerate(rows)])
    pq.write_table(table, folder / "clicks.parquet")
    return jobs.train(
        JobOptions(
            job="ctr", out=folder / "run", recipe=CtrRecipe(model="deepfm", **SMALL), loggers=(), **given, **options
        ),
        Console(quiet=True),
    )


def test_missing_values_and_names_like_ours_are_trained_gone_on_with_scored_and_asked_alike(tmp_path: Path) -> None:
    require_onnx()
    rows = samples(60)
    trained(tmp_path, rows)
    for row in rows:
        row["further"] = 7  # another day has another column
    assert trained(tmp_path, rows, resume=True, resume_steps=5).finished
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "late.parquet")
    done = typed("predict", str(tmp_path / "run"), str(tmp_path / "late.parquet"), "--json")
    assert done.returncode == 0, done.stderr
    scores = json.loads(done.stdout)

    export_clicks(tmp_path / "run", tmp_path / "model", cache=tmp_path, say=print)
    click = load_folder(tmp_path / "model").operations["click"]
    asked = [{name: value for name, value in row.items() if name != "further"} for row in rows]
    answers = click.write(click.run(click.read({"samples": asked})))
    np.testing.assert_allclose([answer["probability"] for answer in answers], scores, atol=1e-5)
    assert np.std(scores) > 0.01
    rank = load_folder(tmp_path / "model").operations["rank"]
    context = {name: asked[0][name] for name in asked[0] if name not in ("item", "history")}
    ranked = rank.read(
        {"context": context, "candidates": [{name: row[name] for name in ("item", "history")} for row in asked]}
    )
    assert rank.write(rank.run(ranked))


def test_a_file_of_no_rows_has_no_scores(tmp_path: Path) -> None:
    trained(tmp_path, samples(30))
    pq.write_table(pq.read_table(tmp_path / "clicks.parquet").slice(0, 0), tmp_path / "none.parquet")
    done = typed("predict", str(tmp_path / "run"), str(tmp_path / "none.parquet"), "--json")
    assert (done.returncode, json.loads(done.stdout or "null")) == (0, []), done.stderr


@pytest.mark.parametrize("column", ["history", "history_items"])
def test_a_column_named_as_a_models_history_is_to_be_renamed(tmp_path: Path, column: str) -> None:
    rows = [{"user": number % 3, "item": number % 4, column: number} for number in range(30)]
    pq.write_table(
        pa.Table.from_pylist([{**row, "click": at % 2, "time": at} for at, row in enumerate(rows)]),
        tmp_path / "a.parquet",
    )
    recipe = CtrRecipe(model="din", history=3, **SMALL)

    def train() -> Any:
        options = JobOptions(
            job="ctr", out=tmp_path / "run", recipe=recipe, data=str(tmp_path / "a.parquet"), loggers=(), overwrite=True
        )
        return jobs.train(options, Console(quiet=True))

    with pytest.raises(gt.errors.ConfigError, match=f"have a column '{column}', and this model .*; rename the column"):
        train()
    table = pq.read_table(tmp_path / "a.parquet")
    names = ["seen" if name == column else name for name in table.column_names]
    pq.write_table(table.rename_columns(names), tmp_path / "a.parquet")
    assert train().finished
