"""The update of rows in one pass, in Triton's interpreter and in tensor operations, against a shard's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from geartrain.ams.tables import array_update
from geartrain.ams.tables.compiled_store import table_hash
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
from geartrain.bridge.kernels.launch import Cost, interpreted, observed
from geartrain.bridge.kernels.rounding import rounding_key
from geartrain.bridge.kernels.row_update import RowArrays, update
from geartrain.bridge.kernels.scaled import narrowed
from geartrain.bridge.rows.tables import TORCH_DTYPES, as_numpy

pytest.importorskip("triton")
L, FIRST = 40, 7
WAYS: dict[str, Callable[[], Any]] = {"kernel": interpreted, "tensors": nullcontext}


def _stored(optimizer: RowOptimizerSpec, dtype: DTypeName, dim: int) -> tuple[TableSpec, RowArrays]:
    slot_dtype: DTypeName = dtype if optimizer.takes_narrow_slots else "float32"
    spec = TableSpec(name="t", dim=dim, num_rows=L, optimizer=optimizer, dtype=dtype, slot_dtype=slot_dtype, seed=5)
    random = torch.Generator().manual_seed(dim)
    return spec, RowArrays(
        rows_LD=torch.randn(L, dim, generator=random).to(TORCH_DTYPES[dtype]),
        slots_LS=torch.zeros(L, spec.slot_dim, dtype=TORCH_DTYPES[slot_dtype]) if spec.has_slots else None,
        updates_L=torch.zeros(L, dtype=torch.int64) if spec.step_bytes else None,
        refused=torch.zeros((), dtype=torch.int64),
        first=FIRST,
        key=rounding_key(spec.seed, table_hash(spec.name)),
    )


def _parts(stored: RowArrays) -> list[Tensor]:
    return [part for part in (stored.rows_LD, stored.slots_LS, stored.updates_L) if part is not None]


def _push_to_shard(
    spec: TableSpec, stored: RowArrays, numbers: np.ndarray, gradient: Tensor, optimizer: RowOptimizerSpec
) -> None:
    array_update.update(
        spec,
        as_numpy(stored.rows_LD),
        None if stored.slots_LS is None else as_numpy(stored.slots_LS),
        numbers,
        gradient.numpy(),
        optimizer=optimizer,
        scale=0.5,
        steps=None if stored.updates_L is None else stored.updates_L.numpy(),
        first_id=FIRST,
    )


OPTIMIZERS = [
    SGD(0.1, weight_decay=0.01),
    Momentum(0.1, 0.9, nesterov=True),
    SparseMomentum(0.1, 0.9, 1e-3),
    Adam(0.01, weight_decay=1e-3),
    Adagrad(0.01, lr_decay=0.2, weight_decay=1e-3),
    AdamW(0.01, betas=(0.0, 0.999), weight_decay=0.1),
    RowWiseAdagrad(0.01, lr_decay=0.2, weight_decay=1e-3),
    RowWiseAdam(0.01, weight_decay=0.1),
    RMSProp(0.01, eps=1e-3, momentum=0.9, centered=True),
    FTRL(0.1, l1=0.1, l2=0.1),
]
DTYPES: tuple[DTypeName, ...] = ("float32", "float16", "bfloat16")
DIMS = (1, 21, 64)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("optimizer", "dtype", "dim"),
    [  # each pair of them
        (optimizer, dtype, DIMS[(number + at) % 3])
        for number, optimizer in enumerate(OPTIMIZERS)
        for at, dtype in enumerate(DTYPES)
    ],
    ids=str,
)
def test_rows_slots_and_counts_are_those_of_a_shard(
    optimizer: RowOptimizerSpec, dtype: DTypeName, dim: int, way: str
) -> None:
    spec, ours = _stored(optimizer, dtype, dim)
    _, theirs = _stored(optimizer, dtype, dim)
    random = torch.Generator().manual_seed(1)
    for number in range(3):
        numbers_N = torch.randperm(L, generator=random)[:30]
        gradient_ND = torch.randn(30, dim, generator=random)
        padded_N, padded_ND = torch.full((35,), -1), torch.full((35, dim), float("nan"))
        padded_N[:30], padded_ND[:30] = numbers_N, gradient_ND
        index, gradient = (slice(3, 33), gradient_ND.clone()) if number == 1 else (padded_N, padded_ND)
        with WAYS[way]():
            update(ours, index, gradient, optimizer, lr=torch.tensor(optimizer.lr), scale=torch.tensor(0.5))
        shard_numbers = np.arange(3, 33) if number == 1 else numbers_N.numpy()
        _push_to_shard(spec, theirs, shard_numbers, gradient_ND, optimizer)
    is_exact = way == "kernel" and "RowWise" not in repr(optimizer) and optimizer.takes_narrow_slots
    for mine, other in zip(_parts(ours), _parts(theirs), strict=True):
        if is_exact:
            assert torch.equal(mine, other)
        else:  # rounded the other way where values differ in their last bits
            assert ((mine.double() - other.double()).abs() <= 1e-5 * (1 + other.double().abs())).double().mean() > 0.97
    assert ours.refused == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_may_be_updated(dtype: DTypeName, way: str) -> None:
    _, stored = _stored(Momentum(0.1, 0.9), dtype, 21)
    before = [part.clone() for part in _parts(stored)]
    none = torch.empty(0, dtype=torch.int64)
    with WAYS[way]():
        update(stored, none, torch.empty(0, 21), Momentum(0.1, 0.9), lr=0.1, scale=torch.tensor(1.0))
    assert all(map(torch.equal, _parts(stored), before))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("optimizer", [SGD(1.0), SparseMomentum(1.0, 0.9), Adam(0.1)], ids=repr)
def test_a_row_that_would_overflow_stays_and_so_do_those_beyond_the_valid_ones(
    optimizer: RowOptimizerSpec, dtype: DTypeName, way: str
) -> None:
    _, stored = _stored(optimizer, dtype, 21)
    before = [part.clone() for part in _parts(stored)]
    gradient_ND = torch.ones(6, 21)
    gradient_ND[1, 4], gradient_ND[3, 20] = float("inf"), float("nan")
    gradient_ND[4] = float("nan")  # padding, as its number is -1, and row 0 after it is not among the valid ones
    numbers_N = torch.tensor([2, 5, 9, 11, -1, 0])
    with WAYS[way]():
        num_valid = torch.tensor(5)
        update(stored, numbers_N, gradient_ND, optimizer, lr=1.0, scale=torch.tensor(1.0), num_valid=num_valid)
    assert stored.refused == 2
    changed = torch.tensor([2, 9])
    for part, old in zip(_parts(stored), before, strict=True):
        is_same = (part == old).view(L, -1).all(1)
        assert is_same.sum() == L - 2 and not is_same[changed].any()


@pytest.mark.parametrize("dim", [5, 128, 300])
@pytest.mark.parametrize("optimizer", [SGD(0.1), SparseMomentum(0.1, 0.9, 1e-3)], ids=repr)
def test_eight_bits_are_those_of_the_tensor_operations(optimizer: RowOptimizerSpec, dim: int) -> None:
    random = torch.Generator().manual_seed(dim)
    rows, row_scales = narrowed(torch.randn(L, dim, generator=random), torch.float8_e4m3fn)
    slots, slot_scales = narrowed(torch.randn(L, dim, generator=random), torch.int8)
    has_slots = bool(optimizer.slots)

    def stored() -> RowArrays:
        return RowArrays(
            rows_LD=rows.clone(),
            slots_LS=slots.clone() if has_slots else None,
            updates_L=None,
            refused=torch.zeros((), dtype=torch.int64),
            first=FIRST,
            key=5,
            row_scales_LK=row_scales.clone(),
            slot_scales_LK=slot_scales.clone() if has_slots else None,
            clock=torch.tensor(3),
        )

    ours, theirs, before = stored(), stored(), stored()
    gradient_ND = torch.randn(30, dim, generator=random)
    gradient_ND[2, dim - 1] = float("nan")
    numbers_N = torch.randperm(L, generator=random)[:30]
    for table, way in ((ours, interpreted), (theirs, nullcontext)):
        with way():
            update(table, numbers_N, gradient_ND.clone(), optimizer, lr=0.1, scale=torch.tensor(0.5))
    assert ours.refused == theirs.refused == 1
    kind = torch.float32
    torch.testing.assert_close(ours.rows(slice(None), kind), theirs.rows(slice(None), kind), rtol=0.13, atol=0.02)
    assert (ours.rows(slice(None), kind) == theirs.rows(slice(None), kind)).float().mean() > 0.99
    assert torch.equal(ours.rows(numbers_N[2:3], kind), before.rows(numbers_N[2:3], kind))
    if has_slots:
        mine, other = ours.slots(slice(None), kind), theirs.slots(slice(None), kind)
        assert mine is not None and other is not None and (mine == other).float().mean() > 0.99


def test_one_start_says_what_it_moves() -> None:
    _, stored = _stored(SparseMomentum(0.1), "bfloat16", 64)
    seen: list[Cost] = []
    with interpreted(), observed(lambda *told: seen.append(told[1])):
        numbers_N = torch.arange(10)
        update(stored, numbers_N, torch.ones(10, 64), SparseMomentum(0.1), lr=0.1, scale=torch.tensor(1.0))
    assert [cost.num_bytes for cost in seen] == [10 * (2 * (2 * 64 + 2 * 64 + 8) + 4 * 64 + 8)]
