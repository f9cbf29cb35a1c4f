"""Samples that change from file to file and from day to day, and names and values that they lack."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

import geartrain as gt

pa = pytest.importorskip("pyarrow", reason="needs pip install 'geartrain[data]'")
pq = pytest.importorskip("pyarrow.parquet", reason="needs pip install 'geartrain[data]'")

from geartrain.workers.samples.kafka.messages import ArrowMessages, MessageTables, plan_of  # noqa: E402
from tests.unit.workers.samples.test_remedies import ipc  # noqa: E402


def days(folder: Path, *tables: dict[str, Any]) -> Path:
    for number, columns in enumerate(tables):
        pq.write_table(pa.table(columns), folder / f"day-{number}.parquet")
    return folder


NARROW: dict[str, Any] = {
    "id": pa.array([1], pa.int32()),
    "price": pa.array([0.1], pa.float32()),
    "prices": pa.array([[0.1]], pa.list_(pa.float32())),
    "city": pa.array(["a"]).dictionary_encode(),
    "tags": pa.array([[]], pa.list_(pa.null())),
    "year": pa.nulls(1),
}
WIDE: dict[str, Any] = {
    "id": pa.array([2**40], pa.int64()),
    "price": pa.array([0.1], pa.float64()),
    "prices": pa.array([[0.1]], pa.list_(pa.float64())),
    "city": pa.array(["b"]),
    "tags": pa.array([[7]], pa.list_(pa.int64())),
    "year": pa.array([1997]),
}


@pytest.mark.parametrize("order", ["wider later", "narrower later"])
def test_a_wider_exact_type_is_taken_and_a_further_column_is_ignored(tmp_path: Path, order: str) -> None:
    tables = [NARROW, {**WIDE, "further": [1]}]
    samples = gt.ParquetSamples(
        days(tmp_path, *(tables if order == "wider later" else [WIDE, {**NARROW, "further": [1]}])),
        batch_size=2,
        hash_strings=True,
        fill={"year": 0},
    )
    (batch,) = samples
    last = -1 if order == "wider later" else 0
    assert batch["id"][last] == 2**40 and batch["id"].min() == 1
    assert batch["price"].dtype == torch.float64 and batch["price"][last] == 0.1
    assert batch["prices"][0].dtype == torch.float64
    cities = gt.hash_strings(["a", "b"]).tolist()
    assert batch["city"].tolist() == (cities if last else cities[::-1])
    assert batch["tags"][0].tolist() == [7] and set(batch["year"].tolist()) == {0, 1997}
    assert "further" not in batch


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_column_that_a_later_file_lacks_is_named_or_filled(tmp_path: Path, kind: str) -> None:
    if kind == "parquet":
        days(tmp_path, {"id": [1], "city": ["a"], "year": [7]}, {"id": [2]})
        reader: Any = gt.ParquetSamples
    else:
        (tmp_path / "day-0.csv").write_text("id,city,year\n1,a,7\n")
        (tmp_path / "day-1.csv").write_text("id\n2\n")
        reader = gt.CsvSamples
    with pytest.raises(gt.errors.ColumnMismatch, match=r"day-1\.\w+ has no column 'city'"):
        reader(tmp_path, batch_size=2, hash_strings=True)
    with pytest.raises(gt.errors.ColumnMismatch, match=r"day-1\.\w+ has no column 'year'"):
        reader(tmp_path, batch_size=2, hash_strings=True, fill={"city": "none"})
    (batch,) = reader(tmp_path, batch_size=2, hash_strings=True, fill={"city": "none", "year": -1})
    assert batch["city"].tolist() == gt.hash_strings(["a", "none"]).tolist()
    assert batch["year"].tolist() == [7, -1]
    with pytest.raises(gt.errors.ColumnMismatch, match="has no column 'yaer'; did you mean 'year'"):
        reader(tmp_path, batch_size=2, columns={"id": "int64", "yaer": "int64"}, fill={"yaer": 0})


def test_messages_of_several_schemas_are_one_batch() -> None:
    schema = {"id": "int64", "price": "float64", "city": "string", "tags": "list<int64>", "year": "int64"}
    plan = plan_of(schema, True, {"year": 0}, "topic 'clicks'")
    tables = MessageTables("clicks", plan, ArrowMessages(plan))
    lacking = {name: column for name, column in WIDE.items() if name != "year"}
    contents = [ipc(pa.table(columns)) for columns in (NARROW, {**WIDE, "further": [1]}, lacking)]
    table = tables.table([tables.rows(0, offset, content) for offset, content in enumerate(contents)])
    assert table.column("id").to_pylist() == [1, 2**40, 2**40]
    assert table.column("city").to_pylist() == gt.hash_strings(["a", "b", "b"]).tolist()
    assert table.column("year").to_pylist() == [0, 1997, 0]


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_missing_text_is_the_empty_one_or_what_stands_for_it(tmp_path: Path, kind: str) -> None:
    if kind == "parquet":
        cities, tags = pa.array(["a", None]), pa.array([["x", None], None])
        pq.write_table(
            pa.table({"city": cities, "word": cities.dictionary_encode(), "tags": tags}), tmp_path / "a.parquet"
        )
        reader: Any = gt.ParquetSamples
        columns: Any = None
        items = ["x", ""]
    else:
        (tmp_path / "a.csv").write_text("city,word,tags\na,a,x\n,,\n")
        reader, columns, items = gt.CsvSamples, {"city": "string", "word": "string", "tags": "list<string>"}, ["x"]
    (batch,) = reader(tmp_path, columns=columns, batch_size=2, hash_strings=True)
    ids = gt.hash_strings(["a", ""]).tolist()
    assert batch["city"].tolist() == batch["word"].tolist() == ids
    assert [part.tolist() for part in batch["tags"]] == [gt.hash_strings(items).tolist(), [0, len(items), len(items)]]
    (batch,) = reader(tmp_path, columns=columns, batch_size=2, hash_strings=True, fill={"city": "none"})
    assert batch["city"].tolist() == gt.hash_strings(["a", "none"]).tolist() and batch["word"].tolist() == ids
    with pytest.raises(
        gt.errors.InvalidArgument, match="fill of column 'city', which is string, is -1; it must be a text"
    ):
        reader(tmp_path, columns=columns, batch_size=2, hash_strings=True, fill={"city": -1})


def test_what_is_asked_for_counts_before_what_a_csv_looks_like(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("day,zip,price,at\n2026-01-02,07,,10:00:00\n2026-01-03,08,0.5,10:00:01\n")
    samples = gt.CsvSamples(
        tmp_path, batch_size=2, hash_strings=["day", "zip", "at"], fill={"price": 1.5}, block_bytes=1
    )
    (batch,) = samples
    assert len(list(samples._source.part_rows)) == 2  # the first block has no price
    assert batch["day"].tolist() == gt.hash_strings(["2026-01-02", "2026-01-03"]).tolist()
    assert batch["zip"].tolist() == gt.hash_strings(["07", "08"]).tolist()
    assert batch["price"].tolist() == [1.5, 0.5]
    (batch,) = gt.CsvSamples(tmp_path, columns=["day", "at"], batch_size=2, hash_strings=True)
    assert batch["at"].tolist() == gt.hash_strings(["10:00:00", "10:00:01"]).tolist()


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_timestamps_are_unix_seconds_where_numbers_are_asked_for(tmp_path: Path, unit: str) -> None:
    moments = [
        datetime(2026, 1, 2, 3, 4, 5, 0 if unit == "s" else 500_000, tzinfo=UTC),
        datetime(1969, 1, 1, tzinfo=UTC),
    ]
    column = pa.array([*moments, None], pa.timestamp(unit, "UTC"))
    pq.write_table(pa.table({"at": column, "now": column}), tmp_path / "a.parquet")
    (batch,) = gt.ParquetSamples(
        tmp_path, columns={"at": "int64", "now": "float64"}, batch_size=3, fill={"at": 0, "now": 0.0}
    )
    assert batch["at"].tolist() == [*(int(moment.timestamp() // 1) for moment in moments), 0]
    assert batch["now"].tolist() == [*(moment.timestamp() for moment in moments), 0]


def test_integers_of_one_file_are_not_joined_by_timestamps_of_another(tmp_path: Path) -> None:
    days(tmp_path, {"at": [1_767_323_045_000]}, {"at": [datetime(2026, 1, 2, tzinfo=UTC)]})
    with pytest.raises(gt.errors.ColumnMismatch, match=r"'at' of .*day-1.parquet is timestamp.*; it must be int64"):
        gt.ParquetSamples(tmp_path, batch_size=2)
