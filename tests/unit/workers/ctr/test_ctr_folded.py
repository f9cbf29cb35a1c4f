"""A model of fields of any 64-bit values: trained, gone on with, scored and asked alike."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import geartrain as gt
from geartrain.serving.folder import load_folder
from geartrain.serving.models.clicks import ClicksModel
from geartrain.workers import jobs
from geartrain.workers.ctr.export import export_clicks
from geartrain.workers.ctr.recipe import CtrRecipe
from geartrain.workers.ctr.samples.kinds import FieldKind, kinds_from_json
from geartrain.workers.ctr.samples.own import OwnSamples
from geartrain.workers.ctr.samples.sources import own_samples
from geartrain.workers.job.options import JobOptions
from tests.support.command_line import typed
from tests.support.served_models import require_onnx

pa = pytest.importorskip("pyarrow", reason="samples from files need the extra data")
pq = pytest.importorskip("pyarrow.parquet", reason="samples from files need the extra data")
FOLD = ("user", "item", "item_tags")
HASHES = np.array([-1, -(2**63), -5, 7, 2**62 + 1])
WIDE = np.array([2**64 - 1, 2**63, 3, 2**53 + 1, 11], np.uint64)
SMALL: dict[str, Any] = {"dim": 4, "hidden": (8,), "batch_size": 20, "steps": 20, "row_lr": 0.1}


def ids_of(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (values.view(np.uint64) & np.uint64(2**63 - 1)).view(np.int64)


def samples(count: int) -> dict[str, Any]:
    random = np.random.default_rng(3)
    users, items = HASHES[random.integers(5, size=count)], WIDE[random.integers(5, size=count)]
    tags = [HASHES[random.integers(5, size=number)].tolist() for number in random.integers(0, 3, count)]
    user = [None if number % 7 == 0 else int(value) for number, value in enumerate(users)]
    return {"user": user, "item": items, "item_tags": tags, "click": np.arange(count) % 2, "time": np.arange(count)}


def test_fields_that_fold_names_are_folded_and_what_is_missing_is_no_id(tmp_path: Path) -> None:
    columns = samples(40)
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    read = own_samples(str(tmp_path / "a.parquet"), fold=FOLD)
    assert read.fields["item"].tolist() == ids_of(columns["item"]).tolist()
    expected = [-1 if value is None else value & (2**63 - 1) for value in columns["user"]]
    assert read.fields["user"].tolist() == expected
    for bag, values in zip(read.fields["item_tags"], columns["item_tags"], strict=True):
        assert bag[: len(values)].tolist() == [value & (2**63 - 1) for value in values]
        assert (bag[len(values) :] == -1).all()
    kinds = kinds_from_json(json.loads(json.dumps(read.schema.to_json()))["kinds"])
    assert kinds["item_tags"] == FieldKind(item="integer", is_list=True, fill=-1, fold=True)
    again = own_samples(str(tmp_path / "a.parquet"), kinds=kinds)
    assert all((again.fields[name] == read.fields[name]).all() for name in FOLD)
    with pytest.raises(gt.errors.ConfigError, match="fold names 'other', which is no field of"):
        own_samples(str(tmp_path / "a.parquet"), fold=["other"])


def test_decimals_are_folded_where_that_is_said(tmp_path: Path) -> None:
    values = [-(2**63), -1, 7, 2**63, 2**64 - 1]
    columns = {"user": pa.array(values, pa.decimal128(20, 0)), "click": [0, 1, 0, 1, 0]}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    read = own_samples(str(tmp_path / "a.parquet"), fold=["user"])
    assert read.fields["user"].tolist() == [value & (2**63 - 1) for value in values]
    again = own_samples(str(tmp_path / "a.parquet"), kinds=read.schema.kinds)
    assert again.fields["user"].tolist() == read.fields["user"].tolist()
    with pytest.raises(gt.errors.ColumnMismatch, match=r"leave it out: --set features\.user\.kind=none"):
        OwnSamples(str(tmp_path / "a.parquet"), features={})


@pytest.mark.parametrize("column", ["user", "item"])
def test_a_run_is_begun_as_the_error_of_values_that_are_no_ids_says(tmp_path: Path, column: str) -> None:
    given = {**samples(40), "user": [1] * 40, "item": [1] * 40, "item_tags": [[1]] * 40, column: samples(40)[column]}
    pq.write_table(pa.table(given), tmp_path / "a.parquet")
    command = ["worker", "ctr", "--data", str(tmp_path / "a.parquet"), "--out", str(tmp_path / "run")]
    command += ["--set", "steps=2", "--set", "batch_size=8"]
    refused = typed(*command)
    assert refused.returncode == 2
    (setting,) = re.findall(r"--set '(fold=\[\w+\])'", " ".join(refused.stderr.replace("│", " ").split()))
    done = typed(*command, "--set", setting)
    assert done.returncode == 0, done.stderr


def test_a_folded_model_is_gone_on_with_scored_and_asked_alike(tmp_path: Path) -> None:
    require_onnx()
    columns = samples(60)
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet")
    recipe = CtrRecipe(model="din", fold=FOLD, split="time", history=4, **SMALL)
    options = {"job": "ctr", "out": tmp_path / "run", "loggers": ()}
    jobs.train(JobOptions(recipe=recipe, data=str(tmp_path / "clicks.parquet"), **options), Console(quiet=True))
    assert jobs.train(JobOptions(recipe=recipe, resume=True, resume_steps=5, **options), Console(quiet=True)).finished

    def scores(**changes: Any) -> Any:
        table = pa.table({name: {**columns, **changes}[name] for name in FOLD})
        pq.write_table(table, tmp_path / "late.parquet")
        done = typed("predict", str(tmp_path / "run"), str(tmp_path / "late.parquet"), "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    expected = scores()
    assert np.std(expected) > 0.001
    np.testing.assert_array_equal(scores(item=ids_of(columns["item"])), expected)
    np.testing.assert_array_equal(scores(item=[str(value) for value in columns["item"]]), expected)

    export_clicks(tmp_path / "run", tmp_path / "model", cache=tmp_path, say=print)
    click = load_folder(tmp_path / "model").operations["click"]
    rows = [{name: columns[name][at] for name in FOLD} for at in range(60)]
    for spell in (int, str):
        folded_here = [
            {
                "user": [] if row["user"] is None else spell(row["user"]),
                "item": spell(int(row["item"])),
                "item_tags": [spell(tag) for tag in row["item_tags"]],
                "history": [[spell(-1), 1], [spell(2**63), 0]],
            }
            for row in rows
        ]
        bare = [
            {
                "user": [] if row["user"] is None else row["user"] & (2**63 - 1),
                "item": int(row["item"]) & (2**63 - 1),
                "item_tags": [tag & (2**63 - 1) for tag in row["item_tags"]],
                "history": [[2**63 - 1, 1], [0, 0]],
            }
            for row in rows
        ]
        answers = [click.write(click.run(click.read({"samples": asked}))) for asked in (folded_here, bare)]
        assert answers[0] == answers[1]
    model = load_folder(tmp_path / "model")
    assert isinstance(model, ClicksModel)
    reader = model.reader
    found = reader.ids_of({"user": HASHES, "item": WIDE, "item_tags": HASHES[:, None]}, FOLD)
    assert found["user"][:, 0].tolist() == ids_of(HASHES).tolist()
    assert found["item"][:, 0].tolist() == ids_of(WIDE).tolist()
    assert found["item_tags"][:, 0].tolist() == ids_of(HASHES).tolist()
    texts = np.array([[b"-1", b"-5"], [b"7", b""]], object)
    assert reader.ids_of({"item_tags": texts}, ["item_tags"])["item_tags"].tolist() == [[2**63 - 1, 2**63 - 5], [7, -1]]
    for wrong in (2**64, -(2**63) - 1, "7.0", True, "-0"):
        with pytest.raises(gt.errors.InvalidArgument, match="give an integer from -2\\^63 to 2\\^64 - 1"):
            click.read({"samples": [{**folded_here[0], "item": wrong}]})
