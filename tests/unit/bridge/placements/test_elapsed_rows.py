"""Dense momentum of rows on ranks: rows that a step does not touch move as often as there were steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.ams.storage.snapshot.folder import open_snapshot
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.errors import InvalidArgument, SnapshotDamaged
from geartrain.ams.values.optimizers.registry import SparseMomentum
from geartrain.ams.values.specs import DTypeName, TableSpec
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.selection.rank_graph import RankGraphs
from geartrain.bridge.placements.device_rows import DeviceRows, as_tensor
from geartrain.bridge.placements.elapsed_momentum import ElapsedSteps
from geartrain.bridge.placements.workspace import Arithmetic, Scratch, Workspace
from tests.support import heads

CLASSES, DIM, BATCH, STEPS = 203, 8, 12, 30
ELAPSED = SparseMomentum(0.5, 0.9, 1e-3, untouched="elapsed")


def make_head(rows: str, cluster: Any = None, dtype: DTypeName = "float32", **settings: Any) -> ClassHead:
    return heads.make_head(
        cluster,
        "faces",
        num_classes=CLASSES,
        dim=DIM,
        select=gt.PartialFC(0.2),
        margin=gt.ArcFace(16, 0.3),
        optimizer=ELAPSED,
        rows=rows,
        dtype=dtype,
        slot_dtype=dtype,
        **settings,
    )


def train(head: ClassHead, steps: range, rank: int = 0, ranks: int = 1, *, classes: int = CLASSES) -> None:
    rows = gt.RowOptimizer(head)
    share = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        features = torch.randn(BATCH, DIM, generator=generator)
        labels = torch.randint(classes, (BATCH,), generator=generator)
        rows.param_groups[0]["lr"] = 0.5 / (1 + step % 7)
        head(features[share], labels[share]).backward()
        rows.step()
        rows.zero_grad()


def assert_alike(ours: Tensor, theirs: Tensor, dtype: DTypeName = "float32") -> None:
    atol = float(theirs.float().abs().max()) * (1e-5 if dtype == "float32" else 4e-2)
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_on_ranks_is_one_that_pulls(cluster: Cluster, dtype: DTypeName) -> None:
    pulled, ours = make_head("pull", cluster, dtype), make_head("ranks", dtype=dtype)
    initial = ours.weights()
    for head in (pulled, ours):
        train(head, range(STEPS), classes=20)
    assert_alike(ours.weights(), pulled.weights(), dtype)
    # Weight decay alone has moved even those that no step had: they are in no gradient, only in the steps.
    assert isinstance(ours.table, DeviceRows) and ours.table.steps_L is not None
    last = ours.table.steps_L
    assert bool((last < STEPS).any()) and not torch.equal(ours.weights()[last < STEPS], initial[last < STEPS])
    features = torch.randn(5, DIM, generator=torch.Generator().manual_seed(99))
    if dtype == "float32":
        assert torch.equal(ours.predict(features, 3)[1], pulled.predict(features, 3)[1])
    frozen = RankGraphs(ours.table).freeze()._rows_LD
    assert torch.equal(torch.from_numpy(frozen), ours.weights().float())
    gone = torch.tensor([3, 7, 60])
    for head in (pulled, ours):
        head.retire_classes(gone)
        train(head, range(STEPS, STEPS + 3), classes=3)
        assert head.add_classes(2).tolist() == [3, 7]
        train(head, range(STEPS + 3, STEPS + 6), classes=3)
    assert_alike(ours.weights(), pulled.weights(), dtype)
    state = ours.state_dict()
    ours.load_state_dict(state)


@pytest.mark.parametrize("compute", [torch.float32, torch.float64])
def test_rows_equal_those_of_torchs_dense_momentum(compute: torch.dtype) -> None:
    spec = TableSpec(name="t", dim=DIM, num_rows=60, optimizer=ELAPSED, seed=3, initializer=gt.Normal(std=0.1))
    table = DeviceRows(spec, cast(Any, SimpleNamespace(world_size=1, rank=0)), torch.device("cpu"))
    weights = nn.Parameter(table.current_rows(slice(None)).double())
    reference = torch.optim.SGD([weights], 0.5, momentum=0.9, weight_decay=1e-3)
    work = Workspace(Arithmetic.of(torch.empty(0, dtype=compute)), Scratch())
    random = np.random.default_rng(0)
    for step in range(STEPS):
        numbers = torch.from_numpy(np.sort(random.permutation(40)[:6]))
        gradient = torch.from_numpy(random.standard_normal((6, DIM)))
        weights.grad = torch.zeros_like(weights).index_copy(0, numbers, gradient)
        reference.param_groups[0]["lr"] = lr = 0.5 / (1 + step % 7)
        # What is read before the step is what the step begins with.
        torch.testing.assert_close(
            table.load(work, numbers, name="rows").double(), weights.detach()[numbers], rtol=1e-5, atol=1e-5
        )
        table.update(numbers, gradient.to(compute, copy=True), replace(ELAPSED, lr=lr), torch.tensor(1.0))
        table.end_step(lr)
        reference.step()
    ours = table.current_rows(slice(None)).double()
    torch.testing.assert_close(ours, weights.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight_decay", [0.0, 1e-3])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("place", [slice(3, 40), torch.tensor([1, 5, 17, 44])], ids=["slice", "numbers"])
def test_what_is_read_has_the_bits_of_a_pull_by_compiled_code_and_by_pytorch(
    dtype: DTypeName, weight_decay: float, place: Any
) -> None:
    optimizer = SparseMomentum(0.1, 0.9, weight_decay, untouched="elapsed")
    spec = TableSpec(name="t", dim=21, num_rows=50, optimizer=optimizer, dtype=dtype, slot_dtype=dtype)
    table = DeviceRows(spec, cast(Any, SimpleNamespace(world_size=1, rank=0)), torch.device("cpu"))
    shard = RowTable(spec, np.arange(4096))
    work = Workspace(Arithmetic.of(torch.empty(0)), Scratch())
    random = np.random.default_rng(1)
    for _ in range(6):
        ids = np.sort(random.permutation(30)[:5])
        gradients = random.standard_normal((5, 21)).astype(np.float32)
        shard.push(ids, gradients, lr=0.2)
        table.update(torch.from_numpy(ids), torch.from_numpy(gradients), replace(optimizer, lr=0.2), torch.tensor(1.0))
        table.end_step(0.2)
    out = np.empty((50, 21), spec.numpy_dtype)
    shard.pull(np.arange(50), out)
    expected = as_tensor(out, table.rows_LD.dtype)[place]
    before = table.rows_LD.clone()
    assert torch.equal(table.current_rows(place), expected)
    assert torch.equal(table.load(work, place, name="rows"), expected.float())
    wide = Workspace(Arithmetic.of(torch.empty(0, dtype=torch.float64)), Scratch())
    assert torch.equal(table.load(wide, place, name="rows"), expected.double())
    assert torch.equal(table.rows_LD, before)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_step_that_a_snapshot_cut_in_two_gives_the_sum_of_both_gradients(compiled: bool) -> None:
    spec = TableSpec(name="t", dim=4, num_rows=5, optimizer=ELAPSED)
    table = DeviceRows(spec, cast(Any, SimpleNamespace(world_size=1, rank=0)), torch.device("cpu"))
    shard = RowTable(spec, np.arange(4096))
    ids, gradients = np.arange(3), np.ones((3, 4), np.float32)
    shard.push(ids, gradients, lr=0.3)
    shard.push(ids, 2 * gradients, lr=0.1, ends_step=False)
    shard.freeze()
    stored = shard.read_frozen(5)
    shard.thaw(kept=True)
    assert stored.slots is not None and stored.steps is not None and shard.steps is not None and table.steps is not None
    table.restore(*(torch.from_numpy(array) for array in stored[:4]))
    table.steps.adopt(shard.steps)
    shard.push(ids, gradients, lr=0.1)
    dtype = torch.float32 if compiled else torch.float64
    step_optimizer = replace(ELAPSED, lr=0.1)
    table.update(torch.from_numpy(ids), torch.from_numpy(gradients).to(dtype), step_optimizer, torch.tensor(1.0))
    table.end_step(0.1)
    out = np.empty((5, 4), np.float32)
    shard.pull(np.arange(5), out)
    torch.testing.assert_close(table.current_rows(slice(None)), torch.from_numpy(out), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("weight_decay", [0.0, 1e-3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sweep_bounds_the_steps_that_are_remembered(dtype: DTypeName, weight_decay: float) -> None:
    optimizer = SparseMomentum(0.1, 0.9, weight_decay, untouched="elapsed")
    spec = TableSpec(name="t", dim=4, num_rows=51, optimizer=optimizer, dtype=dtype, slot_dtype=dtype)
    tables = [
        DeviceRows(spec, cast(Any, SimpleNamespace(world_size=2, rank=rank)), torch.device("cpu")) for rank in range(2)
    ]
    for table in tables:
        table.steps = ElapsedSteps(spec, 26, table.device, window=16)
    exact = RowTable(spec, np.arange(4096))
    for step in range(80):
        gradient = np.full((1, 4), 0.01 * (1 + step % 3), np.float32)
        exact.push(np.array([step % 9]), gradient, lr=0.1)
        if step % 9 < tables[0].stop:
            tables[0].update(torch.tensor([step % 9]), torch.from_numpy(gradient), optimizer, torch.tensor(1.0))
        for table in tables:
            table.end_step(0.1)
        if step == 30:  # nobody touches these again: they come to rest unless they decay
            exact.push(np.array([20, 40]), np.ones((2, 4), np.float32), lr=0.1)
            for table, number in zip(tables, (20, 14), strict=True):
                table.update(torch.tensor([number]), torch.ones(1, 4), optimizer, torch.tensor(1.0))
                table.end_step(0.1)
    states = [table.steps.state for table in tables if table.steps is not None]
    assert states[0] == states[1] and states[0].now == 81 and len(states[0].lrs) <= 2 * 16
    out = np.empty((51, 4), spec.numpy_dtype)
    exact.pull(np.arange(51), out)
    ours = torch.cat([table.current_rows(slice(None)) for table in tables])
    assert_alike(ours, as_tensor(out, ours.dtype), dtype)


def test_a_snapshot_goes_on_to_the_same_bits_and_one_without_its_steps_is_damaged(tmp_path: Path) -> None:
    head = make_head("ranks")
    train(head, range(5))
    path = Path(head.snapshot(tmp_path, "s"))
    assert open_snapshot(path).verify() == []
    back = make_head("ranks")
    back.restore(path)
    assert torch.equal(back.weights(), head.weights())
    back.load_state_dict(head.state_dict())
    for item in (head, back):
        train(item, range(5, 9))
    assert torch.equal(back.weights(), head.weights())
    initial = make_head("ranks").weights()
    dedup = path / "dedup-00000.json"
    dedup.write_bytes(dedup.read_bytes().replace(b"0.5", b"0.6"))
    with pytest.raises(SnapshotDamaged, match="dedup"):
        back.restore(path)
    assert torch.equal(back.weights(), initial)


def test_a_report_counts_the_last_steps_of_rows_on_ranks() -> None:
    report = gt.memory_report(num_classes=10_000, dim=4, rows="ranks", num_ranks=2, optimizer=ELAPSED)
    parts = {part.name: part.bytes for part in report.parts if part.standing}
    assert parts["last steps (elapsed)"] == 5_000 * 8


def test_a_learning_rate_beyond_float32_is_no_step() -> None:
    head = make_head("ranks")
    train(head, range(2))
    rows, before = gt.RowOptimizer(head, lr=1e39), head.weights()
    head(torch.ones(2, DIM), torch.tensor([0, 1])).backward()
    with pytest.raises(InvalidArgument, match="finite as float32"):
        rows.step()
    assert torch.equal(head.weights(), before)
