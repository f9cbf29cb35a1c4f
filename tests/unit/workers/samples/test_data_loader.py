"""Samples of files in a torch DataLoader and over ranks: each comes once an epoch."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, IterableDataset

import geartrain as gt
from geartrain.workers.samples import files

pa = pytest.importorskip("pyarrow", reason="samples from files need the extra data")
pq = pytest.importorskip("pyarrow.parquet", reason="samples from files need the extra data")
csv = pytest.importorskip("pyarrow.csv", reason="samples from files need the extra data")
COUNT, BATCH = 1003, 64


def samples(folder: Path, kind: str = "parquet", **settings: Any) -> Any:
    table = pa.table(
        {"user": np.arange(COUNT) // 7, "x": np.arange(COUNT), "bag": [[at] * (at % 3) for at in range(COUNT)]}
    )
    given = {"batch_size": BATCH, "seed": 3, "window_rows": 200, **settings}
    if kind == "csv":
        csv.write_csv(table.select(["user", "x"]), folder / "a.csv")
        return gt.CsvSamples(folder / "a.csv", block_bytes=1000, **given)
    pq.write_table(table, folder / "a.parquet", row_group_size=150)
    if kind == "parquet":
        return gt.ParquetSamples(folder / "a.parquet", **given)
    if not (folder / "trees").exists():
        gt.compress_samples(folder / "a.parquet", folder / "trees", ["user", "x"], rows_per_group=150)
    return gt.TreeSamples(folder / "trees", **given)


def numbers(batches: Any) -> list[int]:
    return [int(number) for batch in batches for number in batch["x"]]


@pytest.mark.parametrize("kind", ["parquet", "csv", "trees"])
@pytest.mark.parametrize(("num_workers", "start"), [(0, None), (2, "fork"), (2, "spawn")])
def test_workers_of_a_loader_read_a_part_each(tmp_path: Path, kind: str, num_workers: int, start: str | None) -> None:
    data = samples(tmp_path, kind)
    assert isinstance(data, IterableDataset)
    loader = DataLoader(data, batch_size=None, num_workers=num_workers, multiprocessing_context=start)
    data.set_epoch(0)
    first = list(loader)
    assert sorted(numbers(first)) == list(range(COUNT))
    assert len(first) == len(loader) == -(-COUNT // BATCH)
    assert sorted(batch.num_samples for batch in first)[1:] == [BATCH] * (COUNT // BATCH)
    data.set_epoch(1)
    second = numbers(loader)
    assert sorted(second) == list(range(COUNT)) and second != numbers(first)


def test_workers_that_stay_read_the_next_epoch_by_themselves(tmp_path: Path) -> None:
    loader = DataLoader(samples(tmp_path), batch_size=None, num_workers=2, persistent_workers=True)
    epochs = [numbers(loader) for _ in range(2)]
    assert epochs[0] != epochs[1] and all(sorted(epoch) == list(range(COUNT)) for epoch in epochs)


def test_levels_reach_the_process_that_trains(tmp_path: Path) -> None:
    loader = DataLoader(samples(tmp_path, "trees"), batch_size=None, num_workers=2)
    for batch in loader:
        assert (batch["user"][batch.index["user"]] == batch["x"] // 7).all()


@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_read_a_part_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drop_last: bool) -> None:
    monkeypatch.setattr(files.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(files.dist, "get_world_size", lambda: 3)
    parts = []
    for rank in range(3):
        monkeypatch.setattr(files.dist, "get_rank", lambda rank=rank: rank)
        data = pickle.loads(pickle.dumps(samples(tmp_path, drop_last=drop_last)))
        parts.append(list(DataLoader(data, batch_size=None, num_workers=rank)))
        assert len(parts[-1]) == len(data)
    whole = COUNT - COUNT % BATCH if drop_last else COUNT
    seen = [number for part in parts for number in numbers(part)]
    assert len(set(seen)) == len(seen) == whole
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    data = samples(tmp_path)
    data.part(0, 1)
    assert sorted(numbers(data)) == list(range(COUNT))
    with pytest.raises(gt.errors.InvalidArgument, match="number is 3"):
        data.part(3, 3)


def test_a_part_goes_on_where_it_stood_and_another_one_is_refused(tmp_path: Path) -> None:
    data = samples(tmp_path)
    data.part(1, 3)
    batches = list(data)
    state = data.state_dict(batches[2])
    again = samples(tmp_path)
    with pytest.raises(gt.errors.ConfigError, match="give as many ranks and workers as then"):
        again.load_state_dict(state)
    again.part(1, 3)
    again.load_state_dict(state)
    assert numbers(again) == numbers(batches[3:])
    whole = samples(tmp_path)
    for batch in DataLoader(whole, batch_size=None, num_workers=2):
        with pytest.raises(gt.errors.InvalidArgument, match="StatefulDataLoader"):
            whole.state_dict(batch)


def test_the_rest_of_one_part_is_not_taken_for_that_of_another(tmp_path: Path) -> None:
    data = samples(tmp_path)
    reading = iter(data)
    read = [next(reading) for _ in range(3)]
    loader = DataLoader(data, batch_size=None, num_workers=2)
    with pytest.raises(gt.errors.InvalidArgument, match=r"192 samples of epoch 0 .* part 0 of 1, .* set_epoch\(0\)"):
        list(loader)
    again = samples(tmp_path)
    again.load_state_dict(data.state_dict())
    with pytest.raises(gt.errors.InvalidArgument, match="part 0 of 1"):
        list(DataLoader(again, batch_size=None, num_workers=2))
    alone = DataLoader(again, batch_size=None, num_workers=1)
    assert sorted([*numbers(read), *numbers(alone)]) == list(range(COUNT))
    data.set_epoch(0)
    assert sorted(numbers(loader)) == list(range(COUNT))


def test_another_part_is_read_from_its_begin(tmp_path: Path) -> None:
    data = samples(tmp_path)
    data.part(0, 2)
    reading = iter(data)
    first = [next(reading) for _ in range(2)]
    data.part(0, 2)
    first += data
    data.set_epoch(0)
    reading = iter(data)
    next(reading)
    data.part(1, 2)
    next(reading)
    assert sorted([*numbers(first), *numbers(data)]) == list(range(COUNT))


def test_samples_that_are_pickled_before_there_are_ranks_are_read_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pickled = pickle.dumps(samples(tmp_path))
    monkeypatch.setattr(files.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(files.dist, "get_world_size", lambda: 2)
    seen: list[int] = []
    for rank in range(2):
        monkeypatch.setattr(files.dist, "get_rank", lambda rank=rank: rank)
        seen += numbers(pickle.loads(pickled))
    assert sorted(seen) == list(range(COUNT))
