"""Tables whose rows have a limit, over every carrier and through snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import local
from geartrain.ams.storage.snapshot.folder import open_snapshot
from geartrain.ams.storage.snapshot.manifest import ROWS
from geartrain.ams.values import errors
from geartrain.ams.values.optimizers.registry import SGD, Adagrad
from geartrain.bridge.embedding.field import Field
from geartrain.bridge.embedding.group import EmbeddingGroup
from geartrain.bridge.rows.optimizer import RowOptimizer

MAX_BYTES = 200_000
DIM = 8


def push_some(cluster: Cluster, steps: range) -> None:
    table = cluster.table("t")
    for step in steps:
        random = np.random.default_rng(step)
        ids = np.unique(random.zipf(1.2, 400) % 2**40)
        counts = random.integers(1, 5, len(ids))
        gradients = random.standard_normal((len(ids), DIM)).astype(np.float32)
        table.push(ids, gradients, occurrences=counts, step=step, unix_seconds=1e9 + step)


def contents(path: Path | str) -> dict[int, tuple[Any, ...]]:
    """What a whole snapshot holds of each row."""
    found: dict[int, tuple[Any, ...]] = {}
    snapshot = open_snapshot(path)
    for entry in snapshot.manifest.files:
        if entry.kind == ROWS:
            arrays = snapshot.read(entry)
            names = ("rows", "slots", "seen_steps", "seen_seconds", "counts")
            each = zip(*(arrays[name].tolist() for name in names), strict=True)
            found.update(zip(arrays["ids"].tolist(), each, strict=True))
    return found


def test_a_table_never_exceeds_its_limit(cluster: Cluster) -> None:
    table = cluster.create_table("t", dim=DIM, optimizer=Adagrad(0.1), max_bytes=MAX_BYTES)
    for start in range(0, 30, 5):
        push_some(cluster, range(start, start + 5))
        state = cluster.status().tables[0]
        assert state.memory_bytes <= MAX_BYTES
    assert 500 < state.rows < MAX_BYTES // (2 * 4 * DIM)
    with pytest.raises(errors.TableFull, match=r"new rows and \d+ existing ones; .* has room for \d+ rows"):
        table.push(np.arange(10_000), np.ones((10_000, DIM), np.float32))


def test_what_is_known_of_rows_goes_to_any_number_of_shards(tmp_path: Path) -> None:
    with local(2) as cluster:
        cluster.create_table("t", dim=DIM, optimizer=Adagrad(0.1), max_bytes=MAX_BYTES)
        push_some(cluster, range(15))
        whole = cluster.snapshot(tmp_path, "whole").result(60)
        before = set(contents(whole))
        push_some(cluster, range(15, 25))
        child = cluster.snapshot(tmp_path, "child", parent="whole").result(60)
        live = contents(cluster.snapshot(tmp_path / "aside", "live").result(60))
        assert before - set(live), "some were evicted"
    for num_shards in (1, 3):
        with local(num_shards) as other:
            other.restore(child)
            found = contents(other.snapshot(tmp_path / "aside", f"on-{num_shards}").result(60))
            assert found.items() <= live.items()
            assert len(found) > 0.9 * len(live), "shards of other sizes may have room for some fewer"
            assert other.status().tables[0].memory_bytes <= MAX_BYTES
            push_some(other, range(25, 27))
    with local(2) as again:
        again.restore(child)
        assert contents(again.snapshot(tmp_path / "aside", "on-2").result(60)) == live


def test_a_chain_loses_no_row_that_has_room(tmp_path: Path) -> None:
    with local(1) as cluster:
        table = cluster.create_table("t", dim=DIM, optimizer=Adagrad(0.1), max_bytes=MAX_BYTES)
        push_some(cluster, range(15))
        ids = np.array(list(contents(cluster.snapshot(tmp_path, "full").result(60))))
        table.remove(ids[::2])
        child = cluster.snapshot(tmp_path, "half", parent="full").result(60)
        live = contents(cluster.snapshot(tmp_path / "aside", "live").result(60))
    with local(3) as other:
        other.restore(child)
        assert contents(other.snapshot(tmp_path / "aside", "on-3").result(60)) == live


def test_nothing_is_added_to_a_snapshot_that_had_no_room(tmp_path: Path) -> None:
    """Or the rows that were left out would come back with the snapshot before."""
    with local(1) as cluster:
        cluster.create_table("t", dim=DIM, optimizer=Adagrad(0.1), max_bytes=MAX_BYTES)
        push_some(cluster, range(15))
        cluster.snapshot(tmp_path, "full").result(60)
    with local(3) as other:
        other.restore(tmp_path / "full")
        assert other.status().tables[0].rows < len(contents(tmp_path / "full"))
        push_some(other, range(15, 16))
        child = other.snapshot(tmp_path, "child", parent="full").result(60)
        live = contents(other.snapshot(tmp_path / "aside", "live").result(60))
    with local(1) as again:
        again.restore(child)
        assert contents(again.snapshot(tmp_path / "aside", "again").result(60)) == live


def test_the_same_pushes_leave_the_same_rows(tmp_path: Path) -> None:
    found = []
    for name in ("one", "other"):
        with local(2) as cluster:
            cluster.create_table("t", dim=DIM, optimizer=Adagrad(0.1), max_bytes=MAX_BYTES)
            push_some(cluster, range(10))
            found.append(contents(cluster.snapshot(tmp_path, name).result(60)))
    assert found[0] == found[1]


def test_a_field_has_a_limit() -> None:
    with local(2) as cluster:
        fields = EmbeddingGroup(cluster, "m", [Field("item", dim=DIM, max_bytes=MAX_BYTES)], optimizer=SGD(0.1))
        rows = RowOptimizer(fields)
        for step in range(20):
            ids = torch.from_numpy(np.random.default_rng(step).integers(0, 2**40, (100, 4)))
            fields({"item": ids})["item"].sum().backward()
            rows.step()
        assert cluster.status().tables[0].memory_bytes <= MAX_BYTES
