"""What an error of a reader of samples says to do is done here, and then the samples are read."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import geartrain as gt
from tests.support.command_line import typed

pa = pytest.importorskip("pyarrow", reason="needs pip install 'geartrain[data]'")
pq = pytest.importorskip("pyarrow.parquet", reason="needs pip install 'geartrain[data]'")

from geartrain.workers.ctr.samples.own import OwnSamples  # noqa: E402
from geartrain.workers.ctr.samples.settings import FeatureSettings  # noqa: E402
from geartrain.workers.ctr.samples.sources import own_samples  # noqa: E402
from geartrain.workers.samples.kafka.messages import ArrowMessages, JsonMessages, MessageTables, plan_of  # noqa: E402

MOMENT = datetime(2026, 1, 2, 3, 4, 5, 500_000, tzinfo=UTC)
OTHERS = {"id": "int64"}
OPTION = re.compile(r"(fill|fold|hash_strings|columns)=(\{[^}]*\}|\[[^\]]*\]|True)")


def remedies_in(message: str) -> list[dict[str, Any]]:
    """The arguments of each remedy; what a person writes for ... is ``OTHERS``."""
    found = []
    for remedy in re.split(r", or |: name |; for ", message):
        given: dict[str, Any] = {}
        for argument, text in OPTION.findall(remedy):
            others = str(OTHERS if text.startswith("{") else [*OTHERS])[1:-1]
            given[argument] = ast.literal_eval(text.replace("...", others))
        if given:
            found.append(given)
    return found


COLUMNS: dict[str, list[Any]] = {
    "an integer is missing": [1, None],
    "a number is missing": [0.5, None],
    "a boolean is missing": [True, None],
    "an item of a list is missing": [[1], [2, None]],
    "texts": ["a", None],
    "lists of texts": [["a"], None],
    "no value": [None, None],
    "no item": [[], []],
    "timestamps": [MOMENT, MOMENT],
    "dates": [date(2026, 1, 2), date(2026, 1, 3)],
    "decimals": [Decimal("1.50"), Decimal("2.25")],
    "structs": [{"a": 1}, {"a": 2}],
    "integers of 2^63 and more": [1, 2**63],
}


def column_of(what: str) -> Any:
    return pa.array(COLUMNS[what], pa.uint64()) if "2^63" in what else COLUMNS[what]


@pytest.mark.parametrize("what", COLUMNS)
def test_a_column_of_parquet_is_read_as_its_error_says(tmp_path: Path, what: str) -> None:
    pq.write_table(pa.table({"id": [1, 2], "x": column_of(what)}), tmp_path / "a.parquet")
    with pytest.raises(gt.errors.GeartrainError) as refused:
        list(gt.ParquetSamples(tmp_path, batch_size=2))
    remedies = remedies_in(str(refused.value))
    assert remedies, str(refused.value)
    for remedy in remedies:
        (batch,) = gt.ParquetSamples(tmp_path, batch_size=2, **remedy)
        assert batch.num_samples == 2 and "id" in batch


@pytest.mark.parametrize(
    ("text", "given"),
    [
        ("id,x\n1,\n2,5\n", {}),
        ("id,x\n1,\n2,0.5\n", {}),
        ("id,x\n1,\n2,true\n", {}),
        ("id,x\n1,\n2,a\n", {}),
        ("id,x\n1,\n2,2026-01-02\n", {}),
        ("id,x\n1,\n2,\n", {}),
        ("id,x\n1,2\n2,0.5\n", {"block_bytes": 1}),
        ("id,x\n1,2\n2,a\n", {"block_bytes": 1}),
        ("id,x\n1,0.5\n2,a\n", {"block_bytes": 1}),
        ("id,x\n1,2\n2,9223372036854775808\n", {"columns": {"id": "int64", "x": "int64"}}),
        ("id,x\n", {"columns": ["x"]}),
        ("id,x,x\n1,2,3\n", {}),
        ("1,2,3\n", {"columns": ["id", "y"], "names": ["id", "y", "y"]}),
    ],
)
def test_a_csv_is_read_as_its_error_says(tmp_path: Path, text: str, given: dict[str, Any]) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(gt.errors.GeartrainError) as refused:
        list(gt.CsvSamples(tmp_path, batch_size=2, **given))
    remedies = remedies_in(str(refused.value))
    assert remedies, str(refused.value)
    for remedy in remedies:
        list(gt.CsvSamples(tmp_path, batch_size=2, **{**given, **remedy}))


def test_texts_where_numbers_were_asked_for_and_numbers_to_hash(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1, 2], "x": ["a", "b"]}), tmp_path / "a.parquet")
    with pytest.raises(gt.errors.ColumnMismatch, match="ask for a string and give") as refused:
        gt.ParquetSamples(tmp_path, columns={**OTHERS, "x": "int64"}, batch_size=2)
    (remedy,) = remedies_in(str(refused.value))
    assert gt.ParquetSamples(tmp_path, columns={**OTHERS, "x": "string"}, batch_size=2, **remedy)
    with pytest.raises(gt.errors.ColumnMismatch, match="hash_strings takes strings, leave it out there"):
        gt.ParquetSamples(tmp_path, batch_size=2, hash_strings=["x", "id"])
    assert gt.ParquetSamples(tmp_path, batch_size=2, hash_strings=["x"])
    with pytest.raises(gt.errors.InvalidArgument, match="fill names column 'y', which is not read; there are 'id'"):
        gt.ParquetSamples(tmp_path, columns=["id"], batch_size=2, fill={"y": 0})
    assert gt.ParquetSamples(tmp_path, columns=["id"], batch_size=2, fill={"id": 0})


def test_files_whose_numbers_grew_fractions(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1], "x": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"id": [2], "x": [0.5]}), tmp_path / "b.parquet")
    with pytest.raises(gt.errors.ColumnMismatch, match=r"'x' of .*b.parquet is double; it must be int64") as refused:
        gt.ParquetSamples(tmp_path, batch_size=2)
    (remedy,) = remedies_in(str(refused.value))
    (batch,) = gt.ParquetSamples(tmp_path, batch_size=2, **remedy)
    assert batch["x"].tolist() == [1, 0.5]


@pytest.mark.parametrize("form", ["json", "arrow"])
def test_messages_are_read_as_their_error_says(form: str) -> None:
    """The tables of messages without a broker: they raise what a reader of a topic raises."""
    schema = {"id": "int64", "flag": "bool", "price": "float32", "city": "string"}
    if form == "json":
        contents = [b'{"id": 1, "flag": true, "price": 2, "city": "a"}', b"{}"]
    else:
        full = {"id": [1], "flag": [True], "price": [2.0], "city": pa.array(["a"]).dictionary_encode()}
        contents = [ipc(pa.table(columns)) for columns in (full, {name: pa.nulls(1) for name in full})]

    def read(fill: dict[str, Any]) -> Any:
        plan = plan_of(schema, True, fill, "topic 'clicks'")
        tables = MessageTables("clicks", plan, {"json": JsonMessages, "arrow": ArrowMessages}[form](plan))
        return tables.table([tables.rows(0, offset, content) for offset, content in enumerate(contents)])

    fill: dict[str, Any] = {}
    for column in ("id", "flag", "price"):
        with pytest.raises(gt.errors.SourceDamaged, match=f"offset 1: column '{column}' has no value") as refused:
            read(fill)
        (remedy,) = remedies_in(str(refused.value))
        fill |= remedy["fill"]
    table = read(fill)
    assert table.column("city").to_pylist() == gt.hash_strings(["a", ""]).tolist()
    assert read({**fill, "city": "none"}).column("city").to_pylist() == gt.hash_strings(["a", "none"]).tolist()


def ipc(table: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return bytes(sink.getvalue())


@pytest.mark.parametrize("what", ["an integer is missing", "a boolean is missing", "timestamps"])
def test_the_command_line_is_told_of_its_own_options(tmp_path: Path, what: str) -> None:
    pq.write_table(pa.table({"user": [1, 1], "x": COLUMNS[what], "id": [1, 2]}), tmp_path / "a.parquet")
    command = ["samples", "compress", str(tmp_path / "a.parquet"), str(tmp_path / "trees"), "--levels", "user,id"]
    refused = typed(*command)
    assert refused.returncode == 2
    said = " ".join(refused.stderr.replace("│", " ").split())
    assert "={" not in said
    options = [
        part.rstrip(";,") for option in re.findall(r"--(?:fill|column) [a-z]\S*", said) for part in option.split()
    ]
    assert options, said
    others = ["--column", "user:int64", "--column", "id:int64"] if options[0] == "--column" else []
    done = typed(*command, *options, *others)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("what", ["texts", "lists of texts", "timestamps", "whole decimals", "decimals"])
def test_a_recipe_is_told_of_its_own_settings(tmp_path: Path, what: str) -> None:
    column = pa.array([1, 2], pa.decimal128(9, 0)) if what == "whole decimals" else COLUMNS[what]
    pq.write_table(pa.table({"click": [1, 0], "user": [1, 2], "x": column}), tmp_path / "a.parquet")
    kind = {"texts": "int64", "lists of texts": "list<int64>"}.get(what)
    features = {} if kind is None else {"x": FeatureSettings(kind=kind)}
    with pytest.raises(gt.errors.GeartrainError) as refused:
        OwnSamples(str(tmp_path / "a.parquet"), features=features)
    said = str(refused.value)
    assert "columns says" not in said and "hash_strings" not in said
    kinds = re.findall(r"--set '?features\.x\.kind=([a-z0-9<>]+)", said)
    assert kinds, said
    for kind in kinds:
        samples = OwnSamples(str(tmp_path / "a.parquet"), features={"x": FeatureSettings(kind=kind)})
        assert [name for name, *_ in samples.read(0).slice(0, 2).columns()]


def test_times_that_are_texts_are_to_be_whole_numbers(tmp_path: Path) -> None:
    pq.write_table(pa.table({"click": [1], "user": [1], "time": ["2026-01-01"]}), tmp_path / "a.parquet")
    samples = OwnSamples(str(tmp_path / "a.parquet"), times=False)
    with pytest.raises(gt.errors.ColumnMismatch, match=r"'time' .* is string; it must be int64; write it as int64"):
        samples.times(0)


def without(*names: str) -> Callable[[dict[str, Any]], None]:
    return lambda columns: [columns.pop(name) for name in names] and None


def first_row(columns: dict[str, Any]) -> None:
    columns.update({name: values[:1] for name, values in columns.items()})


@pytest.mark.parametrize(
    ("columns", "words", "do"),
    [
        ({"click": [1, None]}, "row 1: column 'click' has no value; write one there, or leave the row out", first_row),
        ({"time": [1, None]}, "row 1: column 'time' has no value; write one there, or leave the row out", first_row),
        ({"x": [None, None]}, "column 'x' of .* has no value .*; leave it out of the file", without("x")),
        ({"x": [MOMENT, MOMENT]}, "column 'x' of .* is timestamp.*: leave it out of the file", without("x")),
        ({"x": [0.5, 1.0]}, "column 'x' .* fractions, .* or leave it out", without("x")),
        ({"click": ["1", "0"]}, "column 'click' of .* holds texts", lambda given: given.update(click=[1, 0])),
        ({"user": [-5, 1]}, "user is -5; ids are >= 0", lambda given: given.update(user=[5, 1])),
        ({"click": [1, 2]}, "click is 2; it must be 0 or 1", lambda given: given.update(click=[1, 0])),
    ],
)
def test_a_file_of_clicks_is_read_once_it_is_written_as_the_error_says(
    tmp_path: Path, columns: dict[str, Any], words: str, do: Callable[[dict[str, Any]], None]
) -> None:
    given = {"click": [1, 0], "user": [1, 2], **columns}
    path = str(tmp_path / "clicks.parquet")
    pq.write_table(pa.table(given), path)
    with pytest.raises(gt.errors.GeartrainError, match=words) as refused:
        own_samples(path)
    assert "={" not in str(refused.value) and "columns" not in str(refused.value)
    do(given)
    pq.write_table(pa.table(given), path)
    assert len(own_samples(path)) == len(given["user"])


def test_a_file_with_two_columns_of_a_name_is_read_without_them_or_with_names_of_their_own(tmp_path: Path) -> None:
    columns = [pa.array([number]) for number in (1, 2, 3)]
    pq.write_table(pa.Table.from_arrays(columns, names=["id", "x", "x"]), tmp_path / "a.parquet")
    for asked in (None, ["x"], {"x": "int64"}):
        with pytest.raises(
            gt.errors.ColumnMismatch, match="has 2 columns 'x'; give them names of their own"
        ) as refused:
            gt.ParquetSamples(tmp_path, columns=asked, batch_size=2)
        (remedy,) = remedies_in(str(refused.value))
        (batch,) = gt.ParquetSamples(tmp_path, batch_size=2, **remedy)
        assert batch["id"].tolist() == [1]
    with pytest.raises(gt.errors.ColumnMismatch, match="has 2 columns 'x'; give them names of their own, or leave it"):
        own_samples(str(tmp_path / "a.parquet"), clicks=False)
    pq.write_table(pa.Table.from_arrays(columns, names=["id", "x", "y"]), tmp_path / "a.parquet")
    assert set(*gt.ParquetSamples(tmp_path, batch_size=2)) == {"id", "x", "y"}
    assert set(own_samples(str(tmp_path / "a.parquet"), clicks=False).fields) == {"id", "x", "y"}
