"""Samples as prefix trees: the same samples, whatever is shared; and batches in which equal samples share a node."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import geartrain as gt
from geartrain.cli.main import build_app, exit_code

pa = pytest.importorskip("pyarrow", reason="needs pip install 'geartrain[data]'")
pq = pytest.importorskip("pyarrow.parquet", reason="needs pip install 'geartrain[data]'")

from geartrain.workers.samples import dedup  # noqa: E402

LEVELS = ["user", "page", "item"]


def write_clicks(path: Path, count: int = 600, users: int = 30) -> Any:
    random = np.random.default_rng(1)
    user, page = np.sort(random.integers(0, users, count)), random.integers(0, 4, count)
    table = pa.table(
        {
            "item": random.integers(0, 50, count),
            "click": random.random(count).astype(np.float32),
            "page": page,
            "slot": (user * 7 + page) % 5,
            "user": user,
            "age": user % 9 / 2,
            "history": pa.array([list(range(item, item + item % 4)) for item in user.tolist()], pa.list_(pa.int64())),
            "city": pa.array([f"city {item % 6}" for item in user.tolist()]),
            "id": np.arange(count),
        }
    )
    pq.write_table(table, path, row_group_size=170)
    return table


def samples_of(batches: Any) -> list[dict[str, Any]]:
    """Every sample of the batches, as plain values."""
    found: list[dict[str, Any]] = []
    for batch in batches:
        rows: dict[str, list[Any]] = {}
        for name, values in batch.items():
            if isinstance(values, tuple):
                items, offsets = values[0].tolist(), values[1].tolist()
                own = [items[first:end] for first, end in pairwise(offsets)]
            else:
                own = values.tolist()
            level = batch.level_of.get(name)
            rows[name] = own if level is None else [own[node] for node in batch.index[level].tolist()]
        assert {len(row) for row in rows.values()} == {batch.num_samples}
        found += [dict(zip(rows, item, strict=True)) for item in zip(*rows.values(), strict=True)]
    return found


def by_id(samples: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    found = {sample["id"]: sample for sample in samples}
    assert len(found) == len(samples)
    return found


@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("seed", [None, 1])
def test_trees_hold_the_same_samples(tmp_path: Path, sort: bool, seed: int | None) -> None:
    write_clicks(tmp_path / "clicks.parquet")
    report = gt.compress_samples(tmp_path / "clicks.parquet", tmp_path / "trees", LEVELS, sort=sort, rows_per_group=250)
    assert report.num_samples == 600 and report.nodes["item"] == 600
    # Two row groups begin in the middle of a user.
    assert report.nodes["user"] <= 32 and (report.nodes["page"] <= 30 * 4 + 2) == sort
    assert report.columns == {
        "user": ("user", "age", "history", "city"),
        "page": ("page", "slot"),
        "item": ("item", "click", "id"),
    }
    plain = gt.ParquetSamples(tmp_path / "clicks.parquet", hash_strings=True, batch_size=600)
    trees = gt.TreeSamples(tmp_path / "trees", hash_strings=True, batch_size=64, seed=seed, window_rows=200)
    batches = list(trees)
    assert [batch.num_samples for batch in batches] == [64] * 9 + [24] and len(trees) == 10
    assert by_id(samples_of(batches)) == by_id(samples_of(plain))
    for batch in batches:
        users, slots = batch["user"][batch.parents["page"]], batch["slot"]
        assert torch.equal(slots, (users * 7 + batch["page"]) % 5)
    assert trees.levels == tuple(LEVELS) == (*batches[0].nodes, "item")
    assert max(batch.nodes["user"].count for batch in batches) < 12  # trees stay together
    whole = gt.TreeSamples(tmp_path / "trees", columns=["user"], batch_size=600, seed=seed, window_rows=600)
    users = [item["user"] for item in samples_of(whole)]
    assert (users == sorted(users)) == (seed is None)
    moves = np.count_nonzero(np.diff(users))
    assert moves < 30 + 2 * 3  # each user is in one place, but for those that were cut, and parts change places
    assert seed is None or np.count_nonzero(np.diff(users) < 0) > 6
    if seed is None and not sort:
        assert [item["id"] for item in samples_of(trees)] == list(range(600))


@given(
    rows=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(0, 2), st.booleans()), max_size=25),
    batch_size=st.integers(1, 7),
    rows_per_group=st.integers(1, 9),
    sort=st.booleans(),
)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_batches_of_any_size_split_trees_of_any_size(
    tmp_path: Path, rows: list[tuple[int, int, int, bool]], batch_size: int, rows_per_group: int, sort: bool
) -> None:
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    folder.mkdir()
    names = ["user", "page", "item", "click"]
    columns = {name: [row[place] for row in rows] for place, name in enumerate(names)}
    types = pa.schema([("user", pa.int64()), ("page", pa.int64()), ("item", pa.int64()), ("click", pa.bool_())])
    pq.write_table(pa.table(columns, types), folder / "a.parquet", row_group_size=4)
    report = gt.compress_samples(
        folder / "a.parquet", folder / "trees", LEVELS, sort=sort, rows_per_group=rows_per_group
    )
    assert report.num_samples == len(rows)
    if not rows:
        return
    expected = sorted(rows, key=lambda row: row[:2]) if sort else rows
    found = samples_of(gt.TreeSamples(folder / "trees", batch_size=batch_size))
    assert [tuple(item[name] for name in names) for item in found] == expected


def test_more_samples_than_memory_are_sorted_by_way_of_files(tmp_path: Path) -> None:
    write_clicks(tmp_path / "a.parquet", users=300)
    columns = {"user": ["city", "user"], "page": ["page"], "item": ["item"]}
    report = gt.compress_samples(tmp_path / "a.parquet", tmp_path / "trees", columns, sort=True, memory_bytes=9_000)
    assert report.nodes["user"] == len(set(pq.read_table(tmp_path / "a.parquet").column("user").to_pylist()))
    plain = samples_of(gt.ParquetSamples(tmp_path / "a.parquet", hash_strings=True, batch_size=600))
    assert by_id(samples_of(gt.TreeSamples(tmp_path / "trees", hash_strings=True, batch_size=50))) == by_id(plain)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.parquet", "trees"]


def train(samples: Any, *, steps: int = 12) -> list[float]:
    torch.manual_seed(0)
    names = ["user", "history", "city", "page", "item"]
    members = [gt.Field(name, dim=4, table="item" if name == "history" else None) for name in names]
    first, last = gt.LevelLinear(dict.fromkeys(names, 4), 8), torch.nn.Linear(8, 1)
    losses = []
    with gt.local() as cluster:
        fields = gt.EmbeddingGroup(cluster, "ctr", members, optimizer=gt.Adagrad(0.1), per_node=True)
        rows, dense = gt.RowOptimizer(fields), [*first.parameters(), *last.parameters()]
        for batch in [*samples, *samples][:steps]:
            logits = last(first(fields(batch), batch).relu()).squeeze(1)
            loss = torch.nn.functional.mse_loss(logits, batch["click"])
            loss.backward()
            rows.step()
            rows.zero_grad()
            with torch.no_grad():
                for item in dense:
                    item -= 0.1 * item.grad
                    item.grad = None
            losses.append(loss.item())
    return losses


def test_a_compressed_run_has_the_losses_of_a_plain_one(tmp_path: Path) -> None:
    write_clicks(tmp_path / "a.parquet")
    gt.compress_samples(tmp_path / "a.parquet", tmp_path / "trees", LEVELS)
    plain = gt.ParquetSamples(tmp_path / "a.parquet", hash_strings=True, batch_size=96)
    columns = {"user": ["user", "history", "city"], "page": ["page"]}
    deduplicated = gt.ParquetSamples(tmp_path / "a.parquet", hash_strings=True, batch_size=96, dedup=columns)
    losses = train(plain)
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(
        train(gt.TreeSamples(tmp_path / "trees", hash_strings=True, batch_size=96)), losses, rtol=1e-5
    )
    np.testing.assert_allclose(train(deduplicated), losses, rtol=1e-5)


def test_workers_share_trees(tmp_path: Path) -> None:
    table = write_clicks(tmp_path / "a.parquet")
    gt.compress_samples(tmp_path / "a.parquet", tmp_path / "trees", LEVELS, rows_per_group=200)
    samples = gt.TreeSamples(tmp_path / "trees", columns=["id", "user"], batch_size=25, seed=3)
    found = []
    with gt.local() as cluster:
        for worker in ("a", "b"):
            with samples.shared(cluster, "job", worker=worker, num_streams=5) as batches:
                for number, batch in enumerate(batches):
                    batches.commit(batch)
                    found.append(batch)
                    if worker == "a" and number == 9:
                        break
    own = by_id(samples_of(found))
    assert {item: own[item]["user"] for item in own} == dict(enumerate(table.column("user").to_pylist()))


@pytest.mark.parametrize("collide", [False, True])
def test_equal_samples_of_a_batch_share_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collide: bool) -> None:
    write_clicks(tmp_path / "a.parquet", users=20)
    if collide:  # every code is that of every other
        monkeypatch.setattr(dedup, "_mixed", np.zeros_like)
    settings = {"hash_strings": True, "batch_size": 100}
    plain = samples_of(gt.ParquetSamples(tmp_path / "a.parquet", **settings))
    groups = {"user": ["user", "age", "history", "city"], "page": ["page"]}
    batches = list(gt.ParquetSamples(tmp_path / "a.parquet", dedup=groups, **settings))
    assert samples_of(batches) == plain
    assert all((batch.nodes["user"].count == len(set(batch["user"].tolist()))) != collide for batch in batches)
    (lists, *_) = gt.ParquetSamples(tmp_path / "a.parquet", dedup=True, **settings)
    assert lists.level_of == {"history": "history"} and samples_of([lists]) == plain[:100]
    for wrong in ("user", {"user": "user"}, {"a": ["user"], "b": ["user"]}, {"a": ["nobody"]}):
        with pytest.raises(gt.errors.InvalidArgument, match="dedup"):
            list(gt.ParquetSamples(tmp_path / "a.parquet", dedup=wrong, **settings))
    mixed = list(gt.ParquetSamples(tmp_path / "a.parquet", dedup=groups, seed=1, **settings))
    assert by_id(samples_of(mixed)) == by_id(plain)


def test_a_set_of_files_that_is_not_whole_is_named(tmp_path: Path) -> None:
    write_clicks(tmp_path / "a.parquet")
    gt.compress_samples(tmp_path / "a.parquet", tmp_path / "trees", LEVELS)
    gt.compress_samples(tmp_path / "a.parquet", tmp_path / "others", LEVELS, sort=True)
    with pytest.raises(gt.errors.SourceDamaged, match=r"a.parquet is no level of sample trees"):
        gt.TreeSamples(tmp_path / "a.parquet", batch_size=5)
    page = tmp_path / "trees" / "part-00000.page.parquet"
    page.write_bytes((tmp_path / "others" / page.name).read_bytes())
    with pytest.raises(
        gt.errors.SourceDamaged, match=r"page.parquet: row group 0 has \d+ nodes.* do not belong together"
    ):
        list(gt.TreeSamples(tmp_path / "trees", hash_strings=True, batch_size=5))
    page.unlink()
    with pytest.raises(gt.errors.SourceDamaged, match=r"no file of level 'page' beside it"):
        gt.TreeSamples(tmp_path / "trees", batch_size=5)


def test_what_cannot_be_compressed_is_said_before_anything_is_written(tmp_path: Path) -> None:
    write_clicks(tmp_path / "a.parquet")
    for levels, words in [
        (["user"], "at least two"),
        (["user", "pag"], r"no column 'pag'; did you mean 'page'"),
        ({"u": ["user"], "i": ["user", "item"]}, "column 'user' is in levels 'u' and 'i'"),
        ("user,item", "give a list"),
        ({"u/v": ["user"], "item": ["item"]}, "letters, digits"),
    ]:
        with pytest.raises(ValueError, match=words):
            gt.compress_samples(tmp_path / "a.parquet", tmp_path / "trees", levels)
    with pytest.raises(gt.errors.InvalidArgument, match="can be sorted by"):
        gt.compress_samples(tmp_path / "a.parquet", tmp_path / "t", {"u": ["history"], "i": ["item"]}, sort=True)
    with pytest.raises(gt.errors.InvalidArgument, match="compression is 'zip7'; it must be one of zstd"):
        gt.compress_samples(tmp_path / "a.parquet", tmp_path / "t", LEVELS, compression="zip7")
    assert [path.name for path in tmp_path.iterdir()] == ["a.parquet"]
    with pytest.raises(gt.errors.InvalidArgument, match="is not empty"):
        gt.compress_samples(tmp_path / "a.parquet", tmp_path, LEVELS)


def test_a_source_that_cannot_be_is_wrong_usage() -> None:
    assert [exit_code(kind("x")) for kind in (gt.errors.SourceNotFound, gt.errors.ColumnMismatch)] == [2, 2]
    assert exit_code(gt.errors.BrokerUnavailable("x")) == 1


def test_the_command_makes_trees_of_csv(tmp_path: Path) -> None:
    lines = [
        f"{user},{user % 3},{'|'.join(map(str, range(user % 3)))},{item}" for user in range(9) for item in range(5)
    ]
    (tmp_path / "a.csv").write_text("user,age,tags,item\n" + "\n".join(lines) + "\n")
    types = [
        f"--column={name}:{kind}"
        for name, kind in zip(("user", "tags", "item"), ("int64", "list<int64>", "int64"), strict=True)
    ]
    command = ["samples", "compress", str(tmp_path / "a.csv"), str(tmp_path / "trees"), "--levels", "who,item"]
    done = CliRunner().invoke(build_app(command), [*command, "--level", "who=user", *types, "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    assert report["nodes"] == {"who": 9, "item": 45} and report["columns"] == {
        "who": ["user", "tags"],
        "item": ["item"],
    }
    (batch,) = gt.TreeSamples(tmp_path / "trees", batch_size=99)
    assert batch["user"].tolist() == list(range(9)) and batch["tags"][1].diff().tolist() == [0, 1, 2] * 3
