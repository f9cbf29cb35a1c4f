"""Any 64-bit value is an id by one rule, wherever it is read."""

from __future__ import annotations

import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import geartrain as gt
from tests.support.command_line import typed

pa = pytest.importorskip("pyarrow", reason="needs pip install 'geartrain[data]'")
pq = pytest.importorskip("pyarrow.parquet", reason="needs pip install 'geartrain[data]'")

from geartrain.workers.samples.kafka.messages import ArrowMessages, JsonMessages, MessageTables, plan_of  # noqa: E402

SIGNED = np.array([-(2**63), -7046029254386353131, -1, 0, 5, 2**63 - 1])
UNSIGNED = np.array([0, 9, 2**63 - 1, 2**63, 2**64 - 1], np.uint64)
VALUES = [*SIGNED.tolist(), *UNSIGNED.tolist()]


def folded(values: np.ndarray[Any, Any]) -> list[int]:
    ids: list[int] = (values.view(np.uint64) & np.uint64(2**63 - 1)).tolist()
    return ids


ALL = folded(SIGNED) + folded(UNSIGNED)


@pytest.mark.parametrize("values", [SIGNED, UNSIGNED])
def test_arrays_tensors_and_lists_fold_alike_and_once(values: np.ndarray[Any, Any]) -> None:
    for given in (values, values.tolist(), values[None], torch.from_numpy(values), values.astype(object)):
        ids = gt.fold_ids(given)
        assert isinstance(ids, torch.Tensor) == isinstance(given, torch.Tensor)
        assert ids.reshape(-1).tolist() == folded(values)
        assert gt.fold_ids(ids).tolist() == ids.tolist()
    assert gt.fold_ids(VALUES).tolist() == ALL
    assert gt.fold_ids(np.array([-1], np.int32)).tolist() == [2**63 - 1]


@pytest.mark.parametrize("values", [[0.5], ["a"], [2**64], [-(2**63) - 1], [None], torch.ones(2), np.array([1.0])])
def test_what_is_no_64_bit_integer_is_refused(values: Any) -> None:
    with pytest.raises(gt.errors.InvalidIds, match="must be integers of up to 64 bits"):
        gt.fold_ids(values)


@pytest.mark.parametrize("kind", ["int64", "uint64", "decimal", "dictionary"])
def test_parquet_folds_values_and_lists_and_leaves_what_is_missing(tmp_path: Path, kind: str) -> None:
    values = UNSIGNED if kind == "uint64" else SIGNED
    arrow = pa.decimal128(20, 0) if kind == "decimal" else pa.from_numpy_dtype(values.dtype)
    column = pa.array([*(map(Decimal, values.tolist()) if kind == "decimal" else values.tolist()), None], arrow)
    column = column.dictionary_encode() if kind == "dictionary" else column
    lists = pa.array([values.tolist()] + [None] * len(values), pa.list_(pa.from_numpy_dtype(values.dtype)))
    pq.write_table(pa.table({"user": column, "seen": lists}), tmp_path / "a.parquet")
    (batch,) = gt.ParquetSamples(tmp_path, batch_size=9, fold=["user", "seen"], fill={"user": -1})
    assert batch["user"].tolist() == [*folded(values), -1]
    assert batch["seen"][0].tolist() == folded(values)


def test_a_csv_folds_values_with_a_sign_and_without_one(tmp_path: Path) -> None:
    lines = [f"{value},{value}|-1" for value in VALUES]
    (tmp_path / "a.csv").write_text("\n".join(["user,seen", *lines, ",\n"]))
    columns = {"user": "int64", "seen": "list<int64>"}
    (batch,) = gt.CsvSamples(tmp_path, columns=columns, batch_size=99, fold=["user", "seen"], fill={"user": -1})
    assert batch["user"].tolist() == [*ALL, -1]
    assert batch["seen"][0][::2].tolist() == ALL
    (batch,) = gt.CsvSamples(tmp_path, columns=["user"], batch_size=99, fold=["user"], fill={"user": -1})
    assert batch["user"].tolist() == [*ALL, -1]
    (tmp_path / "a.csv").write_text(f"user\n{2**64}\n")
    with pytest.raises(gt.errors.SourceDamaged, match="line 2"):
        list(gt.CsvSamples(tmp_path, batch_size=1, fold=["user"]))


def test_messages_fold_as_files_do() -> None:
    schema = {"user": "int64", "seen": "list<int64>"}
    plan = plan_of(schema, False, {"user": -1}, "topic 'clicks'", ["user", "seen"])
    tables = MessageTables("clicks", plan, JsonMessages(plan))
    contents = [b'{"user": %d, "seen": [%d]}' % (value, value) for value in VALUES] + [b'{"seen": []}']
    table = tables.table([tables.rows(0, offset, content) for offset, content in enumerate(contents)])
    assert table.column("user").to_pylist() == [*ALL, -1]
    assert table.column("seen").to_pylist() == [*([one] for one in ALL), []]
    sink = pa.BufferOutputStream()
    message = pa.table({"user": UNSIGNED, "seen": [[int(one)] for one in SIGNED[: len(UNSIGNED)]]})
    with pa.ipc.new_stream(sink, message.schema) as stream:
        stream.write_table(message)
    tables = MessageTables("clicks", plan, ArrowMessages(plan))
    table = tables.table([tables.rows(0, 0, bytes(sink.getvalue()))])
    assert table.column("user").to_pylist() == folded(UNSIGNED)


def test_trees_fold_when_they_are_made_or_when_they_are_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"user": UNSIGNED, "item": SIGNED[: len(UNSIGNED)]}), tmp_path / "a.parquet")
    command = ["samples", "compress", str(tmp_path / "a.parquet"), str(tmp_path / "trees"), "--levels", "user,item"]
    refused = typed(*command)
    assert refused.returncode == 2
    (option,) = re.findall(r"--fold \w+", " ".join(refused.stderr.split()))
    done = typed(*command, *option.split())
    assert done.returncode == 0, done.stderr
    (batch,) = gt.TreeSamples(tmp_path / "trees", batch_size=9, fold=["item", "user"])
    assert batch["user"][batch.index["user"]].tolist() == folded(UNSIGNED)
    assert batch["item"].tolist() == folded(SIGNED[: len(UNSIGNED)])


def test_errors_of_values_that_are_no_ids_say_what_folds_them(tmp_path: Path) -> None:
    pq.write_table(pa.table({"user": UNSIGNED}), tmp_path / "a.parquet")
    with pytest.raises(gt.errors.SourceDamaged, match=r"row 3: column 'user'.*fold=\['user'\]"):
        list(gt.ParquetSamples(tmp_path / "a.parquet", batch_size=9))
    (tmp_path / "a.csv").write_text(f"user\n5\n{2**63}\n")
    with pytest.raises(gt.errors.SourceDamaged, match=r"line 3: column 'user'.*fold=\['user'\]"):
        list(gt.CsvSamples(tmp_path / "a.csv", columns={"user": "int64"}, batch_size=9))
    with gt.local() as cluster:
        fields = gt.Embedding(cluster, "user", 4)
        table = cluster.create_table("t", dim=4, optimizer=gt.SGD(0.1))
        for values in (SIGNED, UNSIGNED):
            for look_up in (fields, table.pull):
                with pytest.raises(gt.errors.InvalidIds, match=r"geartrain.fold_ids .*fold=\[column\] of a reader"):
                    look_up(values)
                assert look_up(gt.fold_ids(values)).shape == (len(values), 4)


@pytest.mark.parametrize(
    ("fold", "message"),
    [
        ("user", "fold is 'user'; give a list of columns"),
        (["other"], "fold names column 'other', which is not read; there are 'user', 'city'"),
        (["city"], "column 'city' is string; fold takes int64 and lists of it, leave it out"),
    ],
)
def test_a_fold_of_what_is_no_column_of_integers_is_refused(tmp_path: Path, fold: Any, message: str) -> None:
    pq.write_table(pa.table({"user": [1], "city": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(gt.errors.GeartrainError, match=message):
        gt.ParquetSamples(tmp_path, batch_size=1, hash_strings=True, fold=fold)
