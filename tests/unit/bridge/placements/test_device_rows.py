"""The rows of one rank."""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.optimizers.registry import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Momentum,
    RMSProp,
    RowOptimizerSpec,
    RowWiseAdagrad,
    RowWiseAdam,
    SparseMomentum,
)
from geartrain.ams.values.specs import DTypeName, TableSpec
from geartrain.bridge.kernels import row_update
from geartrain.bridge.kernels.rounding import ROW, SLOT, round_rows, rounding_key
from geartrain.bridge.placements import device_rows
from geartrain.bridge.placements.device_rows import DeviceRows
from geartrain.bridge.rows.tables import TORCH_DTYPES, as_numpy
from tests.specification import rounding as reference_rounding


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(("rank", "num_local"), [(0, 1), (1, 0)])
def test_a_rank_may_have_no_class(dtype: DTypeName, rank: int, num_local: int) -> None:
    slot_dtype: DTypeName = "int8" if dtype == "float8_e4m3fn" else dtype
    spec = TableSpec(name="t", dim=5, num_rows=1, optimizer=SparseMomentum(0.1), dtype=dtype, slot_dtype=slot_dtype)
    table = DeviceRows(spec, cast(Any, SimpleNamespace(world_size=2, rank=rank)), torch.device("cpu"))
    assert table.rows_LD.shape == (num_local, 5) and table.slots_LS is not None
    table.assign(np.zeros(1, np.int64), np.ones((1, 5), spec.numpy_dtype))
    assert (table.current_rows(slice(None)) == 1).all() and (table.slots_LS == 0).all()


def test_copies_are_counted_where_no_kernel_updates_rows_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_update, "runs_kernels", lambda device: device.type == "cuda")
    for optimizer, are_equal in (
        (Momentum(0.1), True),
        (FTRL(0.1), False),
        (SparseMomentum(0.1, untouched="elapsed"), False),
    ):
        spec = TableSpec(name="t", dim=8, num_rows=9, dtype="bfloat16", optimizer=optimizer)
        cuda, cpu = (DeviceRows.chunk_copies(spec, torch.device(name), picked=True) for name in ("cuda", "cpu"))
        assert (cuda == cpu) == are_equal and cuda >= cpu


OPTIMIZERS = [
    SGD(0.1, weight_decay=0.01),
    Momentum(0.1, 0.9, nesterov=True),
    SparseMomentum(0.1, 0.9, 1e-3),
    SparseMomentum(0.1, 0.9, 1e-3, untouched="elapsed"),
    SparseMomentum(0.1, 0.9, untouched="elapsed"),
    Adam(0.01, weight_decay=1e-3),
    Adagrad(0.01, lr_decay=0.2, weight_decay=1e-3),
    AdamW(0.01, weight_decay=0.1),
    RowWiseAdagrad(0.01, lr_decay=0.2, weight_decay=1e-3),
    RowWiseAdam(0.01, weight_decay=0.1),
    RMSProp(0.01, weight_decay=1e-3),
    RMSProp(0.01, eps=1e-3, momentum=0.9, centered=True),
    FTRL(0.1, l1=0.1, l2=0.1),
]


def _shard_and_ranks(optimizer: RowOptimizerSpec, dtype: DTypeName) -> tuple[RowTable, list[DeviceRows]]:
    slot_dtype: DTypeName = dtype if optimizer.takes_narrow_slots else "float32"
    spec = TableSpec(name="t", dim=21, num_rows=50, optimizer=optimizer, dtype=dtype, slot_dtype=slot_dtype, seed=5)
    links = [cast(Any, SimpleNamespace(world_size=2, rank=rank)) for rank in range(2)]
    return RowTable(spec, np.arange(4096)), [DeviceRows(spec, link, torch.device("cpu")) for link in links]


def _push(
    ranks: list[DeviceRows], ids: np.ndarray, gradients: np.ndarray, optimizer: RowOptimizerSpec, *, by_number: bool
) -> None:
    for rank in ranks:
        places, numbers = rank.local(ids)
        place: Any = numbers if by_number else slice(int(numbers[0]), int(numbers[-1]) + 1)
        rank.update(place, torch.from_numpy(gradients[places]), optimizer, torch.tensor(0.5))
        rank.end_step(optimizer.lr)


def _stored(shard: RowTable) -> tuple[torch.Tensor, torch.Tensor]:
    out = np.empty((50, 21), shard.spec.numpy_dtype)
    shard.pull(np.arange(50), out)
    rows = device_rows.as_tensor(out, TORCH_DTYPES[shard.spec.dtype])
    shard.freeze()
    slots = shard.read_frozen(50).slots
    shard.thaw(kept=True)
    return rows, torch.empty(0) if slots is None else torch.from_numpy(slots.astype(np.float32))


@pytest.mark.parametrize("by_number", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_its_rows_have_the_bits_of_a_shards(dtype: DTypeName, optimizer: RowOptimizerSpec, by_number: bool) -> None:
    shard, ranks = _shard_and_ranks(optimizer, dtype)
    random = np.random.default_rng(0)
    for step in range(8):
        ids = np.sort(random.permutation(50)[:30]) if by_number else np.arange(step % 3, 50 - step)
        gradients = random.standard_normal((len(ids), 21)).astype(np.float32)
        changed = replace(optimizer, lr=0.3 / (1 + step))
        if "weight_decay" in optimizer.settings().keys() - optimizer.fixed.keys():
            changed = replace(changed, weight_decay=0.01 * step)
        scalars = optimizer.scalars_of_push(changed)
        shard.push(ids, gradients, lr=changed.lr, scale=0.5, optimizer_scalars=scalars)
        _push(ranks, ids, gradients, changed, by_number=by_number)
        if step == 3:
            values = random.standard_normal((50, 21)).astype(shard.spec.numpy_dtype)
            shard.assign(np.arange(50), values)
            for rank in ranks:
                rank.assign(np.arange(50), values)
    rows, slots = _stored(shard)
    assert torch.equal(torch.cat([rank.current_rows(slice(None)) for rank in ranks]), rows)
    if ranks[0].slots_LS is not None:
        assert torch.equal(torch.cat([cast(Any, rank.slots_LS).float() for rank in ranks]), slots)


@pytest.mark.parametrize("by_number", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=repr)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_that_pytorch_updates_meet_the_draws_of_a_shards(
    dtype: DTypeName, optimizer: RowOptimizerSpec, by_number: bool
) -> None:
    """In float64, as on a device in float32: values differ in their last bits, and few are rounded otherwise."""
    shard, ranks = _shard_and_ranks(optimizer, dtype)
    random = np.random.default_rng(0)
    for step in range(5):
        ids = np.sort(random.permutation(50)[:30]) if by_number else np.arange(step % 3, 50 - step)
        gradients = random.standard_normal((len(ids), 21)).astype(np.float32)
        shard.push(ids, gradients, lr=0.1, scale=0.5)
        _push(ranks, ids, gradients.astype(np.float64), replace(optimizer, lr=0.1), by_number=by_number)
    rows, slots = _stored(shard)
    ours = torch.cat([rank.current_rows(slice(None)) for rank in ranks])
    if dtype != "float32":
        assert (ours == rows).double().mean() > 0.99
    torch.testing.assert_close(ours.float(), rows.float(), atol=1e-2 if dtype == "bfloat16" else 1e-3, rtol=1e-2)
    if ranks[0].slots_LS is not None:
        ours = torch.cat([cast(Any, rank.slots_LS).float() for rank in ranks])
        if len(slots) == 50:
            torch.testing.assert_close(ours, slots, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_row_that_would_overflow_counts_no_update(dtype: DTypeName, compiled: bool) -> None:
    _, (rank, _) = _shard_and_ranks(SGD(1.0), dtype)
    before = rank.rows_LD.clone()
    gradients = np.ones((3, 21), np.float32 if compiled else np.float64)
    gradients[1, 4] = 3e38
    if dtype == "bfloat16":
        gradients[1, 4] = -3.4028e38
    _push([rank], np.array([2, 5, 9]), gradients, SGD(2.0), by_number=True)
    assert rank.refused == 1 and rank.steps_L is not None
    assert rank.steps_L[[2, 5, 9]].tolist() == [1, 0, 1]
    assert torch.equal(rank.rows_LD[5], before[5]) and not torch.equal(rank.rows_LD[2], before[2])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("dim", [1, 8, 37])
def test_pytorch_rounds_any_value_as_the_reference_does(dtype: DTypeName, dim: int) -> None:
    random = np.random.default_rng(dim)
    values = random.integers(0, 2**32, (400, dim), dtype=np.uint32).view(np.float32)
    values[:50] = random.standard_normal((50, dim)) * 2.0 ** random.integers(-45, 17, (50, dim))
    ids, numbers = random.integers(0, 2**63 - 1, 400), random.integers(1, 2**40, 400)
    key = rounding_key(2**64 - 5, 77)
    for part in (ROW, SLOT):
        ours = round_rows(
            torch.from_numpy(values),
            TORCH_DTYPES[dtype],
            key=key,
            ids_N=torch.from_numpy(ids),
            numbers_N=torch.from_numpy(numbers),
            part=part,
        )
        theirs = np.stack(
            [
                reference_rounding.stored(row, dtype, key=key, row_id=int(i), number=int(t), part=part)
                for row, i, t in zip(values, ids, numbers, strict=True)
            ]
        )
        # As float32: NaN of bfloat16 does not count as equal to itself.
        np.testing.assert_array_equal(as_numpy(ours).astype(np.float32), theirs.astype(np.float32))


def test_rows_that_move_leave_no_memory_behind_on_the_old_device() -> None:
    spec = TableSpec(name="t", dim=4, num_rows=3, optimizer=SparseMomentum(0.1))
    table = DeviceRows(spec, cast(Any, SimpleNamespace(world_size=1, rank=0)), torch.device("cpu"))
    buffer = table.pool.acquire(1000, table.device)
    left = weakref.ref(buffer)
    table.pool.release(buffer)
    del buffer
    assert left() is not None
    table.move_to(torch.device("meta"))
    assert left() is None


def _narrow_rows(dtype: DTypeName = "float8_e4m3fn", slot_dtype: DTypeName = "int8") -> DeviceRows:
    spec = TableSpec(
        name="t", dim=512, num_rows=20, optimizer=SparseMomentum(0.1, 0.9), dtype=dtype, slot_dtype=slot_dtype
    )
    return DeviceRows(spec, cast(Any, SimpleNamespace(world_size=1, rank=0)), torch.device("cpu"))


def test_rows_of_eight_bits_take_1034_bytes_and_are_trained() -> None:
    table, wide = _narrow_rows(), _narrow_rows("float32", "float32")
    spec = table.spec
    parts = (table.rows_LD, table.slots_LS, table.row_scales_LK, table.slot_scales_LK, table.steps_L)
    held = sum(part[:1].nbytes for part in parts if part is not None)
    assert held == spec.row_bytes + spec.slot_bytes + spec.step_bytes == 1034
    random = torch.Generator().manual_seed(0)
    for _ in range(30):
        gradient = torch.randn(20, 512, generator=random) * 1e-3
        for rows in (table, wide):
            rows.update(slice(0, 20), gradient.clone(), spec.optimizer, torch.tensor(1.0))
            rows.end_step(0.1)
    assert table.refused == 0 and table.clock == 30
    difference = table.current_rows(slice(None)).float() - wide.rows_LD
    assert difference.abs().mean() < 0.2 * wide.rows_LD.abs().mean()
    assert difference.mean().abs() < 1e-4


def test_rows_of_eight_bits_stay_where_a_gradient_is_not_finite() -> None:
    table = _narrow_rows()
    before = table.current_rows(slice(None))
    gradient = torch.ones(3, 512)
    gradient[1, 7] = float("nan")
    table.update(torch.tensor([2, 5, 9]), gradient, table.spec.optimizer, torch.tensor(1.0))
    is_same = (table.current_rows(slice(None)) == before).all(1)
    assert table.refused == 1 and is_same.sum() == 18 and is_same[5]


def test_rows_of_eight_bits_do_not_move_unless_touched() -> None:
    optimizer = SparseMomentum(0.1, 0.9, untouched="elapsed")
    with pytest.raises(InvalidArgument, match="freeze"):
        TableSpec(name="t", dim=4, num_rows=3, optimizer=optimizer, dtype="float8_e4m3fn")
    with pytest.raises(InvalidArgument, match="slot_dtype"):
        TableSpec(name="t", dim=4, num_rows=3, optimizer=Adam(0.1), slot_dtype="int8")
