"""Samples of clicks in Parquet files: columns become fields, and what cannot be is named with its column and row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import geartrain as gt
from geartrain.workers.ctr.samples.click_samples import PADDING, split
from geartrain.workers.ctr.samples.sources import own_samples
from geartrain.workers.tdm.clicked_items import split_clicks
from geartrain.workers.tdm.recipe import TdmRecipe

pa = pytest.importorskip("pyarrow", reason="samples from files need the extra data")
pq = pytest.importorskip("pyarrow.parquet", reason="samples from files need the extra data")
COLUMNS: dict[str, Any] = {
    "click": [1, 0, 1],
    "time": [30, 10, 20],
    "user": [7, 8, 7],
    "item": ["a", "b", "a"],
    "item_tags": [[1, 2], [], [3]],
}


def written(folder: Path, **changes: Any) -> str:
    columns = {name: values for name, values in {**COLUMNS, **changes}.items() if values is not None}
    pq.write_table(pa.table(columns), folder / "clicks.parquet")
    return str(folder / "clicks.parquet")


def test_columns_become_fields(tmp_path: Path) -> None:
    samples = own_samples(written(tmp_path))
    assert samples.clicks.tolist() == [1, 0, 1]
    assert samples.times is not None and samples.times.tolist() == [30, 10, 20]
    assert samples.fields["item"].tolist() == gt.hash_strings(["a", "b", "a"]).tolist()
    assert samples.fields["item_tags"].tolist() == [[1, 2], [PADDING, PADDING], [3, PADDING]]
    assert (samples.schema.item, samples.schema.user) == (("item", "item_tags"), "user")
    assert set(samples.fields) == {"user", "item", "item_tags"}
    assert all(ids.dtype == np.int64 for ids in samples.fields.values())
    assert own_samples(written(tmp_path, click=None), clicks=False).clicks.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"click": None}, "has no column 'click'"),
        ({"click": [0, 2, 1]}, "sample 1: click is 2; it must be 0 or 1"),
        ({"click": [[0], [1], [1]]}, "column 'click' .* holds lists"),
        ({"price": [0.5, 1.0, 2.0]}, "column 'price' .* numbers with fractions"),
        ({"prices": [[0.5], [], [2.0]]}, "column 'prices' .* numbers with fractions"),
        ({"user": [7, -8, 7]}, "sample 1: user is -8; ids are >= 0"),
        ({"item_tags": [[1], [], [2, -3]]}, "sample 2: item_tags is -3; ids are >= 0"),
        ({"click": [1, None, 0]}, "clicks.parquet, row 1: column 'click' has no value"),
        ({"user": None, "item": None, "item_tags": None}, "no column beside click and time"),
    ],
)
def test_a_column_that_cannot_be_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(gt.errors.GeartrainError, match=message):
        own_samples(written(tmp_path, **changes))


def test_a_missing_value_is_no_id_or_the_empty_text(tmp_path: Path) -> None:
    columns: dict[str, Any] = {
        "user": [7, None, 7],
        "item": ["a", None, ""],
        "flag": [True, None, False],
        "item_tags": [[1, None], None, [3]],
        "words": [["x", None], None, []],
    }
    samples = own_samples(written(tmp_path, **columns))
    nothing = gt.hash_strings([""]).tolist()[0]
    assert samples.fields["user"].tolist() == [7, PADDING, 7]
    assert samples.fields["item"].tolist()[1:] == [nothing, nothing]
    assert samples.fields["flag"].tolist() == [1, PADDING, 0]
    assert samples.fields["item_tags"].tolist() == [[1, PADDING], [PADDING, PADDING], [3, PADDING]]
    assert samples.fields["words"].tolist() == [[*gt.hash_strings(["x", ""])], [PADDING] * 2, [PADDING] * 2]
    again = own_samples(written(tmp_path, **columns), kinds=samples.schema.kinds)
    assert {name: ids.tolist() for name, ids in again.fields.items()} == {
        name: ids.tolist() for name, ids in samples.fields.items()
    }
    texts = {"user": ["7", None, None], "flag": [1, None, 0], "item_tags": [["1", None], None, ["3"]]}
    converted = own_samples(written(tmp_path, **{**columns, **texts}), kinds=samples.schema.kinds)
    assert converted.fields["user"].tolist() == [7, PADDING, PADDING]
    assert converted.fields["flag"].tolist() == [1, PADDING, 0]
    assert converted.fields["item_tags"].tolist() == [[1, PADDING], [PADDING, PADDING], [3, PADDING]]


def test_strangers_share_no_history(tmp_path: Path) -> None:
    count = 30
    users = [None if number % 3 == 0 else number % 3 for number in range(count)]
    items = [f"i{number}" if number % 5 else None for number in range(count)]
    columns = {"click": [1] * count, "time": [*range(count)], "user": users, "item": items, "item_tags": None}
    samples = own_samples(written(tmp_path, **columns))
    train, test = split(samples, "time", 0, history=100)
    for part, first in ((train, 0), (test, len(train))):
        assert part.histories is not None
        for at in range(len(part)):
            places, _ = part.histories.take(np.array([at]))
            of = [
                number
                for number in range(min(first + at, len(train)))
                if items[number] and users[number] and users[number] == users[first + at]
            ]
            assert part.histories.items[places].tolist() == gt.hash_strings([f"i{number}" for number in of]).tolist()


def test_times_may_be_timestamps(tmp_path: Path) -> None:
    times = pa.array([30, 10, 20], pa.int64()).cast(pa.timestamp("s", "UTC")).cast(pa.timestamp("us", "UTC"))
    found = own_samples(written(tmp_path, time=times)).times
    assert found is not None and found.tolist() == [30, 10, 20]


def test_a_file_of_no_rows_has_no_samples(tmp_path: Path) -> None:
    table = pa.table(COLUMNS).slice(0, 0)
    pq.write_table(table, tmp_path / "none.parquet")
    samples = own_samples(str(tmp_path / "none.parquet"), clicks=False)
    assert len(samples) == 0 and set(samples.fields) == {"user", "item", "item_tags"}
    with pytest.raises(gt.errors.ConfigError, match="there are 0 samples"):
        split(samples, "random", 0)
    again = own_samples(str(tmp_path / "none.parquet"), clicks=False, kinds=samples.schema.kinds)
    assert len(again) == 0


def test_samples_of_a_model_are_read_by_its_fields(tmp_path: Path) -> None:
    kinds = own_samples(written(tmp_path)).schema.kinds
    changed = own_samples(written(tmp_path, further=[1, 2, 3], user=[None] * 3, item_tags=[[], [], []]), kinds=kinds)
    assert set(changed.fields) == set(kinds) and changed.fields["user"].tolist() == [PADDING] * 3
    with pytest.raises(gt.errors.ColumnMismatch, match="has no column 'user', which the model was trained on"):
        own_samples(written(tmp_path, user=None), kinds=kinds)
    with pytest.raises(gt.errors.InvalidArgument, match=r"sample 1: user is 1.5; the model was trained on integers"):
        own_samples(written(tmp_path, user=[None, 1.5, None]), kinds={**kinds, "user": kinds["user"]})


def test_a_tree_learns_nothing_of_strangers_and_of_items_that_nobody_knows(tmp_path: Path) -> None:
    count = 40
    columns = {
        "click": [1] * count,
        "time": [*range(count)],
        "user": [None if number % 4 == 0 else number % 4 for number in range(count)],
        "item": [None if number % 5 == 0 else number for number in range(count)],
        "item_tags": None,
    }
    liked = split_clicks(own_samples(written(tmp_path, **columns)), TdmRecipe(split="time"))
    assert liked.items.tolist() == [number for number in range(count) if number % 5 and number % 4]
    assert set(liked.train.fields["user"].tolist()) == {1, 2, 3}
