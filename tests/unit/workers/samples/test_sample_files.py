"""Batches from Parquet and CSV files: every row once, in the order that was asked for; and what cannot be read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import geartrain as gt

pa = pytest.importorskip("pyarrow", reason="needs pip install 'geartrain[data]'")
pq = pytest.importorskip("pyarrow.parquet", reason="needs pip install 'geartrain[data]'")
parquet = pytest.importorskip("geartrain.workers.samples.parquet", reason="needs pip install 'geartrain[data]'")


def write_parts(folder: Path, sizes: Iterable[int], row_group_size: int = 40) -> int:
    first = 0
    for number, size in enumerate(sizes):
        ids = np.arange(first, first + size)
        table = {
            "id": pa.array(ids),
            "small": pa.array((ids % 100).astype(np.int16)),
            "history": pa.array([list(range(i, i + i % 4)) for i in ids.tolist()], pa.list_(pa.int32())),
            "pair": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids, 2)), 2),
            "city": pa.array([f"city {i % 5}" for i in ids.tolist()]),
            "tags": pa.array([["a", "b"][: i % 3] for i in ids.tolist()], pa.list_(pa.string())),
            "click": pa.array(ids % 2 == 0),
            "price": pa.array(ids / 3),
        }
        pq.write_table(pa.table(table), folder / f"part-{number}.parquet", row_group_size=row_group_size)
        first += size
    return first


def ids_of(batches: Iterable[Any]) -> list[int]:
    return [int(item) for batch in batches for item in batch["id"]]


def test_batches_have_one_size_across_files_and_the_last_is_kept_or_dropped(tmp_path: Path) -> None:
    count = write_parts(tmp_path, [101, 7, 250])
    samples = gt.ParquetSamples(tmp_path, columns=["id"], batch_size=32)
    batches = list(samples)
    assert [batch.num_samples for batch in batches] == [32] * 11 + [6]
    assert (len(samples), samples.num_samples, ids_of(batches)) == (12, count, list(range(count)))
    dropped = gt.ParquetSamples(tmp_path, columns=["id"], batch_size=32, drop_last=True)
    assert (len(dropped), ids_of(dropped)) == (11, list(range(352)))
    assert ids_of(dropped) == list(range(352))  # the next epoch


def test_columns_come_as_the_ids_and_numbers_that_modules_take(tmp_path: Path) -> None:
    write_parts(tmp_path, [90])
    (batch,) = gt.ParquetSamples(str(tmp_path / "*.parquet"), hash_strings={"city": 3, "tags": 0}, batch_size=90)
    ids = torch.arange(90)
    assert torch.equal(batch["id"], ids) and torch.equal(batch["small"], ids % 100)
    assert batch["small"].dtype == torch.int64
    values, offsets = batch["history"]
    assert torch.equal(offsets.diff(), ids % 4) and values[offsets[5]] == 5 and values.dtype == torch.int64
    assert torch.equal(batch["pair"], ids.repeat_interleave(2).view(90, 2))
    assert batch["city"].tolist() == gt.hash_strings([f"city {i % 5}" for i in range(90)], seed=3).tolist()
    tags, ends = batch["tags"]
    assert torch.equal(ends.diff(), ids % 3)
    assert tags[ends[2] : ends[3]].tolist() == gt.hash_strings(["a", "b"]).tolist()
    assert batch["click"].dtype == torch.bool and batch["price"].dtype == torch.float64
    (typed,) = gt.ParquetSamples(tmp_path, columns={"price": "float32", "small": "float32"}, batch_size=90)
    assert typed["price"].dtype == typed["small"].dtype == torch.float32
    with gt.local() as cluster:
        fields = gt.EmbeddingGroup(
            cluster, "g", [gt.Field("history", dim=2), gt.Field("city", dim=1)], optimizer=gt.SGD(1)
        )
        assert fields(batch)["history"].shape == (90, 2)


def test_an_order_by_seed_is_another_one_each_epoch_and_the_same_again(tmp_path: Path) -> None:
    count = write_parts(tmp_path, [200, 130])
    make = lambda seed: gt.ParquetSamples(tmp_path, columns=["id"], batch_size=50, seed=seed, window_rows=70)  # noqa: E731
    samples = make(1)
    first, second = ids_of(samples), ids_of(samples)
    assert first != second != sorted(second) and sorted(first) == sorted(second) == list(range(count))
    assert first == ids_of(make(1)) and first != ids_of(make(2))


def test_reading_goes_on_after_a_batch_of_another_size(tmp_path: Path) -> None:
    write_parts(tmp_path, [200, 130])
    whole = gt.ParquetSamples(tmp_path, columns=["id"], batch_size=50, seed=1, window_rows=70)
    expected = ids_of(whole) + ids_of(whole)
    begun = gt.ParquetSamples(tmp_path, columns=["id"], batch_size=45, seed=1, window_rows=70)
    reading = iter(begun)
    read = [next(reading) for _ in range(4)]
    state = begun.state_dict(read[2])
    again = gt.ParquetSamples(tmp_path, columns=["id"], batch_size=60, seed=1, window_rows=70)
    again.load_state_dict(state)
    assert ids_of(read[:3]) + ids_of(again) + ids_of(again) == expected
    with pytest.raises(gt.errors.ConfigError, match="other samples"):
        gt.ParquetSamples(tmp_path, columns=["id"], batch_size=60, seed=2).load_state_dict(state)


@pytest.mark.parametrize("seen", [1, 3, 7])
def test_what_prefetch_read_ahead_is_read_by_the_next_loop(tmp_path: Path, seen: int) -> None:
    write_parts(tmp_path, [200, 130])
    make = lambda: gt.ParquetSamples(tmp_path, columns=["id"], batch_size=50, seed=1, window_rows=70)  # noqa: E731
    whole, samples = make(), make()
    expected = ids_of(whole) + ids_of(whole)
    with gt.local() as cluster:
        fields = gt.EmbeddingGroup(cluster, "g", [gt.Field("id", dim=1)], optimizer=gt.SGD(1))
        found: list[int] = []
        run = iter(gt.prefetch(samples, fields, depth=5, stages=[(dict, 2)], pull_threads=2))
        for _ in range(seen):
            found += ids_of([next(run)[0]])
        run.close()  # as break does
        assert samples.state_dict()["consumed"] == len(found) % 330
        while len(found) < len(expected):
            found += ids_of(batch for batch, _ in gt.prefetch(samples, fields))
    assert found == expected


def test_a_folder_is_read_below_it_without_what_is_hidden(tmp_path: Path) -> None:
    for name in ("day=1", "_temporary", ".cache"):
        (tmp_path / name).mkdir()
        write_parts(tmp_path / name, [10])
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / "README.txt").touch()
    assert ids_of(gt.ParquetSamples(tmp_path, columns=["id"], batch_size=4)) == list(range(10))
    assert ids_of(gt.ParquetSamples(f"file://{tmp_path}/day=1", columns=["id"], batch_size=4)) == list(range(10))


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (["ids"], r"part-0.parquet has no column 'ids'; did you mean 'id'\?"),
        ({"city": "int64"}, r"column 'city' of .*part-0.parquet is string; it must be int64.*hash_strings=\['city'\]"),
        ({"id": "list<int64>"}, "column 'id' of .* is int64; it must be list<int64>"),
        ({"pair": "int64[3]"}, r"is fixed_size_list.*\[2\]; it must be int64\[3\]"),
        ({"price": "int64"}, "column 'price' of .* is double; it must be int64"),
    ],
)
def test_a_column_that_is_missing_or_of_another_type_is_named(tmp_path: Path, columns: Any, words: str) -> None:
    write_parts(tmp_path, [10])
    with pytest.raises(gt.errors.ColumnMismatch, match=words):
        gt.ParquetSamples(tmp_path, columns=columns, batch_size=4)


def test_samples_of_no_column_are_refused(tmp_path: Path) -> None:
    write_parts(tmp_path, [10])
    with pytest.raises(gt.errors.InvalidArgument, match=r"no column of .*part-0.parquet is read; .* it has 'id'"):
        gt.ParquetSamples(tmp_path, columns=[], batch_size=4)


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("id", "none", r"fill of column 'id', which is int64, is 'none'; it must be an integer"),
        ("id", 0.5, r"fill of column 'id', which is int64, is 0.5; it must be an integer"),
        ("price", "free", r"fill of column 'price', which is float64, is 'free'; it must be a number"),
    ],
)
def test_what_stands_for_a_missing_value_is_of_the_columns_type(
    tmp_path: Path, column: str, value: Any, words: str
) -> None:
    write_parts(tmp_path, [10])
    with pytest.raises(gt.errors.InvalidArgument, match=words):
        gt.ParquetSamples(tmp_path, columns=["id", "price"], fill={column: value}, batch_size=4)


def test_a_later_file_with_other_columns_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"id": ["one"]}), tmp_path / "b.parquet")
    with pytest.raises(
        gt.errors.ColumnMismatch, match=r"'id' of .*b.parquet is string; it must be int64, as .*a.parquet"
    ):
        gt.ParquetSamples(tmp_path, batch_size=4)


def test_a_missing_value_names_its_row_or_is_filled(tmp_path: Path) -> None:
    lists = pa.array([[1], None, [2, 3], [4, None]], pa.list_(pa.int64()))
    table = pa.table({"id": pa.array([5, 6, None, 8]), "list": lists})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    with pytest.raises(gt.errors.SourceDamaged, match=r"a.parquet, row 2: column 'id' has no value.*fill=\{'id': -1\}"):
        list(gt.ParquetSamples(tmp_path, columns=["id"], batch_size=4))
    with pytest.raises(gt.errors.SourceDamaged, match=r"a.parquet, row 3: column 'list'"):
        list(gt.ParquetSamples(tmp_path, columns=["list"], batch_size=4))
    (batch,) = gt.ParquetSamples(tmp_path, batch_size=4, fill={"id": -1, "list": 0})
    assert batch["id"].tolist() == [5, 6, -1, 8]
    assert [part.tolist() for part in batch["list"]] == [[1, 2, 3, 4, 0], [0, 1, 1, 3, 5]]


def test_a_file_that_is_cut_or_damaged_or_changes_is_named(tmp_path: Path) -> None:
    write_parts(tmp_path, [100, 100])
    samples = gt.ParquetSamples(tmp_path, columns=["id"], batch_size=30)
    path = tmp_path / "part-1.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:-200])
    with pytest.raises(gt.errors.SourceDamaged, match=r"part-1.parquet is no whole Parquet file"):
        gt.ParquetSamples(tmp_path, batch_size=4)
    reading = iter(samples)
    assert ids_of(next(reading) for _ in range(3)) == list(range(90))
    with pytest.raises(gt.errors.SourceDamaged, match=r"part-1.parquet has changed"):
        next(reading)
    path.write_bytes(whole)
    assert ids_of(samples) == list(range(90, 200))  # nothing was lost by the error
    path.write_bytes(b"PAR1" + b"\xff" * 900 + whole[904:])
    with pytest.raises(gt.errors.SourceDamaged, match=r"part-1.parquet: row group 0 \(rows 0 to 39\)"):
        list(gt.ParquetSamples(path, columns=["id"], batch_size=100))


def test_files_may_lie_wherever_fsspec_reaches(tmp_path: Path) -> None:
    write_parts(tmp_path, [70, 30])
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").put(str(tmp_path), "/clicks/day=1", recursive=True)
    samples = gt.ParquetSamples("memory://clicks", columns=["id"], batch_size=30)
    assert ids_of(samples) == list(range(100))
    with fsspec.open("memory://clicks/day=1/part-1.parquet", "wb") as opened:
        opened.write(b"PAR1")
    with pytest.raises(gt.errors.SourceDamaged, match=r"memory:/.*part-1.parquet is no whole Parquet file"):
        gt.ParquetSamples("memory://clicks/day=1/*.parquet", columns=["id"], batch_size=30)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(gt.errors.SourceNotFound, match="is not there"):
        gt.ParquetSamples(tmp_path / "none", batch_size=4)
    with pytest.raises(gt.errors.SourceNotFound, match=r"no file that ends in \.parquet"):
        gt.ParquetSamples(tmp_path, batch_size=4)
    with pytest.raises(gt.errors.InvalidArgument, match="no place that fsspec can read"):
        gt.ParquetSamples("nosuch://bucket", batch_size=4)
    write_parts(tmp_path, [10])
    with pytest.raises(gt.errors.InvalidArgument, match=r"'city' .* holds strings; hash_strings"):
        gt.ParquetSamples(tmp_path, batch_size=4)
    with pytest.raises(gt.errors.InvalidArgument, match="batch_size is 0"):
        gt.ParquetSamples(tmp_path, columns=["id"], batch_size=0)


def write_csv(path: Path, count: int) -> None:
    lines = [f"{i},{'|'.join(map(str, range(i % 3)))},town {i % 4},{i / 2}" for i in range(count)]
    path.write_text("id,list,town,price\n" + "\n".join(lines) + "\n")


def test_csv_is_read_as_parquet_is(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", 500)
    columns = {"id": "int64", "list": "list<int64>", "town": "string", "price": "float32"}
    samples = gt.CsvSamples(tmp_path, columns=columns, hash_strings=True, batch_size=64, block_bytes=999)
    batches = list(samples)
    assert ids_of(batches) == list(range(500)) and len(batches) == len(samples) == 8
    values, offsets = batches[0]["list"]
    assert torch.equal(offsets.diff(), torch.arange(64) % 3) and values.tolist()[:3] == [0, 0, 1]
    assert batches[0]["town"].tolist() == gt.hash_strings([f"town {i % 4}" for i in range(64)]).tolist()
    assert batches[0]["price"].dtype == torch.float32
    mixed = gt.CsvSamples(tmp_path, columns=["id"], batch_size=64, block_bytes=999, seed=1, window_rows=50)
    assert sorted(ids_of(mixed)) == list(range(500)) != ids_of(mixed)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("id,b\n1,2\n\n3\n5,6\n", "a.csv, line 4: 1 columns, where there must be 2: '3'"),
        ("id,b\n1,2\n\n3,x\n5,6\n", "a.csv, line 4: column 'b' is no int64"),
        ("id,b\r\n1,2\r\n3,4\r\n5,\r\n", "a.csv, line 4: column 'b' has no value"),
        ("id,c\n1,2\n", "a.csv has no column 'b'"),
        ("", "a.csv is empty; the first line must name the columns"),
        ("\n1,2\n", "a.csv has a blank first line; the first line must name the columns"),
        ("\x1f\x8b", "a.csv is compressed"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.csv").write_bytes(text.encode("latin-1"))
    with pytest.raises(gt.errors.SourceError, match=words):
        list(gt.CsvSamples(tmp_path, columns={"id": "int64", "b": "int64"}, batch_size=4))


def test_a_list_in_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,b\n1,2|3\n2,\n3,4|x\n")
    with pytest.raises(gt.errors.SourceDamaged, match=r"a.csv, line 4: column 'b'"):
        list(gt.CsvSamples(tmp_path, columns={"b": "list<int64>"}, batch_size=4))


def test_a_csv_without_names_or_last_line_break(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("1\tx\n\n2\ty")
    (batch,) = gt.CsvSamples(tmp_path, names=["id", "b"], delimiter="\t", hash_strings=True, batch_size=4)
    assert batch["id"].tolist() == [1, 2] and batch["b"].tolist() == gt.hash_strings(["x", "y"]).tolist()


@pytest.mark.parametrize("seed", [None, 3])
def test_a_large_row_group_is_read_slice_by_slice_and_gives_the_samples_of_small_ones(
    tmp_path: Path, seed: int | None
) -> None:
    table = pa.table({"x": np.arange(300_000), "bag": [[at] * (at % 3) for at in range(300_000)]})
    pq.write_table(table, tmp_path / "large.parquet", row_group_size=200_000)
    samples = gt.ParquetSamples(tmp_path / "large.parquet", batch_size=7_000, seed=seed, window_rows=20_000)
    first = list(samples)
    seen = np.concatenate([batch["x"].numpy() for batch in first])
    assert (np.sort(seen) == np.arange(300_000)).all() and (seed is None) == (seen == np.sort(seen)).all()
    for batch in first:
        values, offsets = batch["bag"]
        assert (offsets.diff().numpy() == batch["x"].numpy() % 3).all()
        assert (values.numpy() == np.repeat(batch["x"].numpy(), batch["x"].numpy() % 3)).all()
    again = gt.ParquetSamples(tmp_path / "large.parquet", batch_size=7_000, seed=seed, window_rows=20_000)
    again.load_state_dict(samples.state_dict(first[30]))
    assert (next(iter(again))["x"] == first[31]["x"]).all()
    plain = gt.ParquetSamples(tmp_path, batch_size=4096)
    shared = [plain._reader(plain._order(4)) for _ in range(2)]
    parts = []
    for number, reader in enumerate(shared):
        reader.add({stream: (0, 0) for stream in range(4) if stream % 2 == number})
        while (batch := reader.next_batch(0)) is not None:
            parts.append(batch["x"].numpy())
    assert (np.sort(np.concatenate(parts)) == np.arange(300_000)).all()


@pytest.mark.parametrize("row_group_size", [3_000, 200_000])
def test_texts_of_few_and_of_many_words_are_hashed_alike(tmp_path: Path, row_group_size: int) -> None:
    texts = [None if at % 11 == 0 else f"word {at % (7 if at < 100_000 else 90_000)}" for at in range(200_000)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=row_group_size)
    found = [batch["text"] for batch in gt.ParquetSamples(tmp_path, batch_size=9_000, hash_strings={"text": 5})]
    expected = gt.hash_strings(["" if text is None else text for text in texts], seed=5)
    assert (np.concatenate(found) == expected).all()


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_nothing_of_a_large_row_group_is_lost_by_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    count = 300_000
    pq.write_table(pa.table({"id": np.arange(count)}), tmp_path / "a.parquet", row_group_size=count)
    read, calls = pa.Table.from_batches, iter(range(100))

    def failing(batches: Any) -> Any:
        if next(calls) == 2:
            raise error("connection reset")
        return read(batches)

    class Tables:
        from_batches = staticmethod(failing)

    monkeypatch.setattr(parquet.pa, "Table", Tables)
    reading = iter(gt.ParquetSamples(tmp_path, batch_size=50_000, seed=0, window_rows=100_000))
    found: list[int] = []
    errors = 0
    while True:
        try:
            found += next(reading)["id"].tolist()
        except StopIteration:
            break
        except (gt.errors.SourceDamaged, KeyboardInterrupt):
            errors += 1
    assert errors == 1 and sorted(found) == list(range(count))


def test_a_large_row_group_that_ends_early_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 140_000
    pq.write_table(pa.table({"id": np.arange(count)}), tmp_path / "a.parquet", row_group_size=count)
    monkeypatch.setattr(parquet._LargeGroup, "_read", lambda _: iter(()))
    reading = iter(gt.ParquetSamples(tmp_path, batch_size=50_000))
    for _ in range(2):
        with pytest.raises(gt.errors.SourceDamaged, match=r"a.parquet: row group 0 ends before its 140000 rows"):
            next(reading)
