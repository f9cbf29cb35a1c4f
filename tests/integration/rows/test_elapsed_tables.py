"""Tables whose untouched rows move as under dense momentum: over carriers, repeated, on ranks, in snapshots."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import local
from geartrain.ams.client.table import Table
from geartrain.ams.observe.failpoints import armed
from geartrain.ams.server.freeze.dedup import joint_steps, restore_steps
from geartrain.ams.storage.snapshot.compaction import compact
from geartrain.ams.storage.snapshot.folder import prune
from geartrain.ams.tables.compiled_store import ELAPSED_WINDOW
from geartrain.ams.tables.row_table import RowTable, TableSteps
from geartrain.ams.values import errors
from geartrain.ams.values.optimizers.registry import SparseMomentum
from geartrain.ams.values.shard_messages import SyncGroup
from geartrain.ams.values.specs import DTypeName, Ids, TableSpec

NUM_ROWS, DIM, MOMENTUM, DECAY = 300, 4, 0.9, 0.01
EVERY_ID = np.arange(NUM_ROWS)
TOLERANCES: dict[str, float] = {"float32": 2e-6, "float16": 4e-3, "bfloat16": 4e-2}
Doubles = npt.NDArray[np.float64]


def make(cluster: Cluster, num_rows: int | None = NUM_ROWS, **settings: Any) -> Table:
    optimizer = SparseMomentum(0.1, momentum=MOMENTUM, weight_decay=DECAY, untouched="elapsed")
    return cluster.create_table("t", dim=DIM, optimizer=optimizer, num_rows=num_rows, seed=3, **settings)


class Dense:
    """Momentum on every row at every step, in float64."""

    def __init__(self, table: Table) -> None:
        self.rows: Doubles = table.pull(EVERY_ID).astype(np.float64)
        self.slots: Doubles = np.zeros_like(self.rows)

    def step(self, ids: Ids, gradients: npt.NDArray[Any], lr: float) -> None:
        self.slots = MOMENTUM * self.slots + DECAY * self.rows
        np.add.at(self.slots, ids, gradients.astype(np.float64))
        self.rows = self.rows - lr * self.slots

    def require(self, table: Table) -> None:
        tolerance = TOLERANCES[table.spec.dtype] * np.abs(self.rows).max()
        np.testing.assert_allclose(table.pull(EVERY_ID).astype(np.float64), self.rows, rtol=0, atol=tolerance)


def some(step: int) -> tuple[Ids, npt.NDArray[np.float32], float]:
    """Few rows, so that most shards have none; and their gradients, and a learning rate."""
    random = np.random.default_rng(step)
    ids = random.choice(NUM_ROWS, step % 4, replace=False)
    return ids, random.standard_normal((len(ids), DIM)).astype(np.float32), 0.2 / (1 + step)


@pytest.mark.parametrize(("dtype", "num_rows"), [("float32", None), ("float32", NUM_ROWS), ("float16", NUM_ROWS)])
def test_every_row_equals_dense_momentum_wherever_it_is(
    cluster: Cluster, dtype: DTypeName, num_rows: int | None
) -> None:
    table = make(cluster, num_rows, dtype=dtype)
    dense = Dense(table)
    for step in range(20):
        table.push(*some(step)[:2], lr=some(step)[2])
        dense.step(*some(step))
        if step % 6 == 5:
            dense.require(table)
    dense.require(table)


def test_a_repeated_push_is_one_step(cluster: Cluster) -> None:
    table = make(cluster)
    dense = Dense(table)
    for step in range(1, 5):
        ids, gradients, lr = some(step)
        write = table.prepare_push(ids, gradients, lr=lr)
        with armed("client.reply.after=error"), pytest.raises(errors.GeartrainError):
            write.send()  # every shard has it, the caller does not know
        write.send()
        dense.step(ids, gradients, lr)
    dense.require(table)


def test_pushes_of_one_step_move_the_others_once(cluster: Cluster) -> None:
    table = make(cluster)
    dense = Dense(table)
    for step in range(8):
        ids, gradients, lr = some(3 + 4 * step)
        for piece in range(3):
            table.prepare_push(
                ids[piece : piece + 1], gradients[piece : piece + 1], lr=lr, step_goes_on=piece < 2
            ).send()
        dense.step(ids, gradients, lr)
    dense.require(table)


def test_a_synchronous_step_of_all_ranks_is_one_step() -> None:
    with local(2) as cluster:
        table = make(cluster)
        dense = Dense(table)
        for step in range(6):
            parts = [some(step), some(step + 101)]
            lr = parts[0][2]

            def push(rank: int, step: int = step, parts: Any = parts, lr: float = lr) -> None:
                group = SyncGroup(job="j", world_size=2, rank=rank, sequence=step + 1, sample_count=3 - 2 * rank)
                table.push(*parts[rank][:2], lr=lr, group=group)

            on_ranks(push)
            ids = np.concatenate([part[0] for part in parts])
            dense.step(ids, np.concatenate([0.75 * parts[0][1], 0.25 * parts[1][1]]), lr)
        dense.require(table)


def on_ranks(push: Callable[[int], None]) -> None:
    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(push, range(2)))


def train(table: Table, dense: Dense, steps: range) -> None:
    for step in steps:
        ids, gradients, lr = some(step)
        table.push(ids, gradients, lr=lr)
        dense.step(ids, gradients, lr)


@pytest.mark.parametrize("window", [16, ELAPSED_WINDOW])
@pytest.mark.parametrize("num_rows", [None, NUM_ROWS])
def test_snapshots_go_on_where_they_were_on_any_number_of_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int, num_rows: int | None
) -> None:
    """The sweep for old rows is at another place on each shard; an increment has few of the rows that move."""
    monkeypatch.setattr(RowTable.__init__, "__kwdefaults__", {"threads": 1, "window": window})
    with local(3) as cluster:
        table = make(cluster, num_rows)
        dense = Dense(table)
        train(table, dense, range(30))
        cluster.snapshot(tmp_path, "a").result(60)
        train(table, dense, range(30, 37))
        cluster.snapshot(tmp_path, "b", parent="a").result(60)
        train(table, dense, range(37, 45))
        paths = [cluster.snapshot(tmp_path, "c", parent="b").result(60)]
        live = table.pull(EVERY_ID)
        dense.require(table)
    paths.append(Path(compact(tmp_path, "c")))
    rows, slots = dense.rows, dense.slots
    for path in paths:
        for num_shards in (1, 3, 4):
            with local(num_shards) as other:
                other.restore(path)
                restored = other.table("t")
                np.testing.assert_array_equal(restored.pull(EVERY_ID), live)
                dense.rows, dense.slots = rows, slots
                train(restored, dense, range(45, 60))
                dense.require(restored)
        prune(tmp_path, 1)


def test_a_snapshot_that_does_not_know_the_steps_is_refused() -> None:
    steps = TableSteps(5, [0.4, 0.5], (1.0, 0.0))
    older = TableSteps(5, [0.2, 0.3, 0.4, 0.5], (1.0, 0.0))
    behind = TableSteps(4, [0.1, 0.2, 0.3, 0.4], (1.0, 0.0))
    assert joint_steps([steps, older]) == joint_steps([older, steps]) == older
    assert joint_steps([steps, behind]).lrs == [0.1, 0.2, 0.3, 0.4, 0.5]
    with pytest.raises(errors.InvalidArgument, match="remembers the learning rate of step 3"):
        joint_steps([steps, TableSteps(2, [0.1, 0.2], (1.0, 0.0))])
    optimizer = SparseMomentum(0.1, untouched="elapsed")
    table = RowTable(TableSpec(name="t", dim=2, optimizer=optimizer), np.arange(4096))
    for source in ({}, {"steps": {}}, {"steps": {"t": [5, [-1.0], [1.0, 0.0]]}}, {"steps": {"t": [1, "x", [1, 0]]}}):
        with pytest.raises(errors.SnapshotDamaged, match="does not say which steps table 't' had made"):
            restore_steps([source], {"t": table})
