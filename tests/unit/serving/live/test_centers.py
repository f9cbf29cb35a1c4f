"""Class rows of a snapshot: the same by the changes since another as by reading everything."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import local
from geartrain.ams.client.table import Table
from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.storage.snapshot.folder import Snapshot, open_snapshot
from geartrain.ams.values.errors import SnapshotDamaged
from geartrain.serving.live.centers import centers_of

C, D = 300, 8


def made(cluster: Cluster, **settings: object) -> Table:
    fields = {"dim": D, "num_rows": C, "optimizer": gt.SparseMomentum(lr=0.1), "initializer": gt.Normal(), **settings}
    return cluster.create_table("t", **fields)  # type: ignore[arg-type]


def snapshot(cluster: Cluster, root: Path, step: int, parent: Snapshot | None = None) -> Snapshot:
    older = None if parent is None else parent.path
    return open_snapshot(cluster.snapshot(root, step=step, tables=["t"], parent=older).result())


def push(table: Table, seed: int) -> None:
    random = np.random.default_rng(seed)
    ids = random.choice(C, 20, replace=False)
    table.push(ids, random.normal(size=(20, D)).astype(np.float32))


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_rows_are_those_of_the_table_however_many_snapshots_lie_between(tmp_path: Path) -> None:
    live = LiveClasses(C)
    with local(num_shards=3) as cluster:
        table = made(cluster)
        push(table, 0)
        taken = [snapshot(cluster, tmp_path, 0)]
        first = centers_of(taken[0], "t", live, None, unit=D)
        np.testing.assert_allclose(first.rows, unit(table.pull(np.arange(C))), rtol=1e-6)
        assert first.changed is None
        for step in (1, 2, 3):
            push(table, step)
            taken.append(snapshot(cluster, tmp_path, step, taken[-1]))
        now = unit(table.pull(np.arange(C)))
        changed = centers_of(taken[3], "t", live, first, unit=D)
        whole = centers_of(taken[3], "t", live, None, unit=D)
    np.testing.assert_allclose(changed.rows, now, rtol=1e-6)
    np.testing.assert_array_equal(changed.rows, whole.rows)
    assert changed.changed is not None
    others = np.setdiff1d(np.arange(C), changed.changed)
    np.testing.assert_array_equal(changed.rows[others], first.rows[others])
    assert len(changed.changed) <= 60


def test_rows_that_move_at_every_step_are_where_the_training_has_them(tmp_path: Path) -> None:
    with local(num_shards=2) as cluster:
        table = made(cluster, optimizer=gt.SparseMomentum(lr=0.1, untouched="elapsed"))
        push(table, 0)
        before = snapshot(cluster, tmp_path, 0)
        first = centers_of(before, "t", LiveClasses(C), None)
        for seed in (1, 2, 3):
            push(table, seed)
        after = centers_of(snapshot(cluster, tmp_path, 3, before), "t", LiveClasses(C), first)
        np.testing.assert_array_equal(after.rows, table.pull(np.arange(C)))


def test_only_living_classes_have_rows_newcomers_those_of_their_own(tmp_path: Path) -> None:
    old = LiveClasses(C, [[5, 10], [200, C]])
    new = LiveClasses(C, [[0, 3], [8, 10], [202, C]])  # 0 … 2 went, 5 … 7, 200 and 201 came
    with local(num_shards=2) as cluster:
        table = made(cluster)
        push(table, 0)
        before = snapshot(cluster, tmp_path, 0)
        first = centers_of(before, "t", old, None)
        newcomers = np.array([5, 6, 7, 200, 201])
        table.assign(newcomers, np.full((5, D), 7, np.float32))
        push(table, 1)
        later = centers_of(snapshot(cluster, tmp_path, 1, before), "t", new, first)
        np.testing.assert_array_equal(later.rows, table.pull(new.all_ids))
    assert len(later.rows) == new.num_live_classes


def test_a_shard_that_wrote_all_of_its_rows_is_read_as_a_whole(tmp_path: Path) -> None:
    with local(num_shards=2) as cluster:
        table = made(cluster)
        push(table, 0)
        first = centers_of(snapshot(cluster, tmp_path, 0), "t", LiveClasses(C), None)
        cluster.drop_table("t")
        table = made(cluster)  # its rows are as they were made, and of the others nothing counts
        push(table, 5)
        later = centers_of(snapshot(cluster, tmp_path, 1), "t", LiveClasses(C), first)
        np.testing.assert_array_equal(later.rows, table.pull(np.arange(C)))
    assert later.changed is None


def test_a_damaged_block_is_named(tmp_path: Path) -> None:
    with local(num_shards=1) as cluster:
        push(made(cluster), 0)
        taken = snapshot(cluster, tmp_path, 0)
    block = next(path for path in Path(taken.path).iterdir() if path.name.startswith("rows-"))
    data = bytearray(block.read_bytes())
    data[-1] ^= 1
    block.write_bytes(data)
    with pytest.raises(SnapshotDamaged, match=block.name):
        centers_of(taken, "t", LiveClasses(C), None)
    with pytest.raises(SnapshotDamaged, match="no table 't' of 7 classes"):
        centers_of(taken, "t", LiveClasses(7), None)
