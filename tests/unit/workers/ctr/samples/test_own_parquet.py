"""Samples of clicks in Parquet files: columns become fields, and what cannot be is named with its column and row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import geartrain as gt
from geartrain.workers.ctr.samples.click_samples import PADDING
from geartrain.workers.ctr.samples.parquet import read_parquet

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
    samples = read_parquet(written(tmp_path))
    assert samples.clicks.tolist() == [1, 0, 1]
    assert samples.times is not None and samples.times.tolist() == [30, 10, 20]
    assert samples.fields["item"].tolist() == gt.hash_strings(["a", "b", "a"]).tolist()
    assert samples.fields["item_tags"].tolist() == [[1, 2], [PADDING, PADDING], [3, PADDING]]
    assert (samples.schema.item, samples.schema.user) == (("item", "item_tags"), "user")
    assert set(samples.fields) == {"user", "item", "item_tags"}
    assert all(ids.dtype == np.int64 for ids in samples.fields.values())
    assert read_parquet(written(tmp_path, click=None), clicks=False).clicks.tolist() == [0, 0, 0]


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
        ({"user": [7, None, 7]}, "clicks.parquet, row 1: column 'user' has no value"),
        ({"user": None, "item": None, "item_tags": None}, "no column beside click and time"),
    ],
)
def test_a_column_that_cannot_be_is_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(gt.errors.GeartrainError, match=message):
        read_parquet(written(tmp_path, **changes))
