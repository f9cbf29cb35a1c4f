"""Samples of clicks are the same from Parquet, CSV and sample trees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import geartrain as gt
from geartrain.workers.ctr.samples.own import OwnSamples
from geartrain.workers.ctr.samples.settings import FeatureSettings

pa = pytest.importorskip("pyarrow", reason="samples from files need the extra data")
pq = pytest.importorskip("pyarrow.parquet", reason="samples from files need the extra data")
csv = pytest.importorskip("pyarrow.csv", reason="samples from files need the extra data")
COUNT = 40
SAID = {
    "tags": FeatureSettings(kind="list<int64>"),
    "words": FeatureSettings(kind="list<string>"),
    "zip": FeatureSettings(kind="string"),
    "hash": FeatureSettings(hash="fold"),
}


def columns() -> dict[str, Any]:
    random = np.random.default_rng(0)
    user = np.sort(random.integers(5, size=COUNT))
    return {
        "click": random.integers(2, size=COUNT),
        "user": [None if number == 3 else int(number) for number in user],
        "city": [f"city {number % 3}" for number in user],
        "item": random.integers(9, size=COUNT),
        "flag": [None if number == 7 else number % 2 == 0 for number in range(COUNT)],
        "tags": [[number, number + 1][: number % 3] for number in range(COUNT)],
        "words": [["a", "b"][: 1 + number % 2] for number in range(COUNT)],
        "zip": [f"0{number % 4}501" for number in range(COUNT)],
        "hash": [number - 3 for number in range(COUNT)],
    }


def written(folder: Path, kind: str) -> str:
    table = pa.table(columns())
    if kind == "csv":
        for name in ("tags", "words"):
            texts = pa.array(["|".join(map(str, bag)) for bag in columns()[name]])
            table = table.set_column(table.column_names.index(name), name, texts)
        csv.write_csv(table, folder / "clicks.csv")
        return str(folder / "clicks.csv")
    pq.write_table(table, folder / "clicks.parquet", row_group_size=16)
    if kind == "parquet":
        return str(folder / "clicks.parquet")
    fill = {"user": -1, "flag": False}
    gt.compress_samples(folder / "clicks.parquet", folder / "trees", ["user", "item"], fill=fill, rows_per_group=16)
    return str(folder / "trees")


@pytest.mark.parametrize("kind", ["csv", "trees"])
def test_every_kind_of_file_gives_the_samples_of_parquet(tmp_path: Path, kind: str) -> None:
    expected = OwnSamples(written(tmp_path, "parquet"), features=SAID).in_memory()
    found = OwnSamples(written(tmp_path, kind), features=SAID).in_memory()
    assert found.clicks.tolist() == expected.clicks.tolist()
    assert set(found.fields) == set(expected.fields)
    for name, ids in expected.fields.items():
        if name == "flag" and kind == "trees":
            ids = np.where(ids == -1, 0, ids)
        assert found.fields[name].tolist() == ids.tolist(), name


@pytest.mark.parametrize("kind", ["parquet", "csv", "trees"])
def test_a_file_is_read_for_a_model_as_it_was_for_its_training(tmp_path: Path, kind: str) -> None:
    place = written(tmp_path, kind)
    trained = OwnSamples(place, features=SAID)
    again = OwnSamples(place, clicks=False, kinds=trained.kinds).in_memory()
    for name, ids in trained.in_memory().fields.items():
        assert again.fields[name].tolist() == ids.tolist(), name


def test_moments_and_decimals_are_read_for_a_model_as_they_were_for_its_training(tmp_path: Path) -> None:
    columns = {"when": pa.array([1, 2], pa.timestamp("us")), "price": pa.array([3, 4], pa.decimal128(20, 0))}
    pq.write_table(pa.table({"click": [0, 1], **columns}), tmp_path / "a.parquet")
    trained = OwnSamples(str(tmp_path / "a.parquet"), features=dict.fromkeys(columns, FeatureSettings(kind="int64")))
    again = OwnSamples(str(tmp_path / "a.parquet"), clicks=False, kinds=trained.kinds).in_memory()
    assert {name: ids.tolist() for name, ids in again.fields.items()} == {"when": [0, 0], "price": [3, 4]}


def test_a_value_of_csv_that_a_model_was_not_trained_on_is_named_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("click,user\n1,7\n", encoding="utf-8")
    kinds = OwnSamples(str(tmp_path / "a.csv")).kinds
    for count, end in (
        (1, "'x'\"$"),
        (600_000, "lines before hold int64: the model was trained on such values, write one"),
    ):
        lines = ["user", *["7654321"] * count, "x"]
        (tmp_path / "b.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        with pytest.raises(gt.errors.SourceDamaged, match=f"line {count + 2}: column 'user' is no int64: .*{end}"):
            OwnSamples(str(tmp_path / "b.csv"), clicks=False, kinds=kinds).in_memory()


def test_a_value_that_is_no_id_is_named_by_its_sample_in_trees_too(tmp_path: Path) -> None:
    table = pa.table({"click": [1, 0, 1, 0], "user": [1, 1, -5, -5], "item": [1, 2, 3, 4]})
    pq.write_table(table, tmp_path / "clicks.parquet")
    gt.compress_samples(tmp_path / "clicks.parquet", tmp_path / "trees", ["user", "item"])
    with pytest.raises(gt.errors.SourceDamaged, match="sample 2: user is -5; ids are >= 0"):
        OwnSamples(str(tmp_path / "trees")).in_memory()


def test_a_value_that_is_no_id_is_no_error_of_samples_of_other_nodes(tmp_path: Path) -> None:
    table = pa.table({"click": [1, 0, 1, 0], "user": [1, 1, -5, -5], "item": [1, 2, 3, 4]})
    pq.write_table(table, tmp_path / "clicks.parquet")
    gt.compress_samples(tmp_path / "clicks.parquet", tmp_path / "trees", ["user", "item"])
    rows = OwnSamples(str(tmp_path / "trees")).read(0)
    assert rows.slice(0, 2).num_rows == 2
    with pytest.raises(gt.errors.SourceDamaged, match="sample 3: user is -5; ids are >= 0"):
        rows.slice(3, 1)


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_times_with_fractions_are_whole_seconds(tmp_path: Path, kind: str) -> None:
    table = pa.table({"click": [0, 1, 0], "user": [1, 2, 3], "time": [1.5, 2.0, 3.9]})
    place = str(tmp_path / f"a.{kind}")
    csv.write_csv(table, place) if kind == "csv" else pq.write_table(table, place)
    times = OwnSamples(place, times=False, features={}).times(0)
    assert times.dtype == np.int64 and times.tolist() == [1, 2, 3]


def test_what_is_said_of_a_feature_wins_over_what_its_values_look_like(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("click,zip,note\n1,07,x\n0,12,\n", encoding="utf-8")
    said = {"zip": FeatureSettings(kind="string"), "note": FeatureSettings(kind="none")}
    found = OwnSamples(str(tmp_path / "a.csv"), features=said).in_memory()
    assert {name: ids.tolist() for name, ids in found.fields.items()} == {"zip": gt.hash_strings(["07", "12"]).tolist()}


def test_what_a_file_holds_that_was_not_guessed_is_read_as_its_error_says(tmp_path: Path) -> None:
    lines = ["click,zip", *["1,7"] * 1_200_000, "0,ab"]  # beyond the lines that types are guessed from
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    samples = OwnSamples(str(tmp_path / "a.csv"), features={})
    with pytest.raises(gt.errors.SourceDamaged, match=r"line 1200002: .*--set 'features.zip.kind=string'$"):
        samples.in_memory()
    said = OwnSamples(str(tmp_path / "a.csv"), features={"zip": FeatureSettings(kind="string")})
    assert len(said.in_memory()) == 1_200_001


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("user,item,click\n", "clicks.csv holds no samples; give a file with a row for each"),
        ("user,item,click\n1,2,\n3,4,\n", "column 'click' of .* shows its type; write whole numbers there$"),
        ("user,item,click,click\n1,2,0,1\n", "has 2 columns 'click'; give them .*, or leave it out of the file$"),
        ("user,item,click\n1,,0\n3,,1\n", "column 'item' of .* --set 'features.item.kind=int64'$"),
    ],
)
def test_a_file_that_lacks_samples_or_clicks_is_refused_with_what_can_be_done(
    tmp_path: Path, text: str, words: str
) -> None:
    (tmp_path / "clicks.csv").write_text(text)
    with pytest.raises(gt.errors.SourceError, match=words):
        OwnSamples(str(tmp_path / "clicks.csv"), features={})
