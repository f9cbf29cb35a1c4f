"""Rows in arrays of the caller's: the same bits as those of a table, and nothing half done."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from geartrain.ams.kernels import ops
from geartrain.ams.tables import array_update as array_update
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.optimizers.registry import SGD, Momentum, RowOptimizerSpec, SparseMomentum
from geartrain.ams.values.specs import TableSpec

LENGTH, DIM = 200, 19

OPTIMIZERS = [
    SGD(0.1, weight_decay=0.01),
    Momentum(0.1, momentum=0.8),
    Momentum(0.1, momentum=0.8, nesterov=True),
    SparseMomentum(0.1, weight_decay=0.02),
]


def given(spec: TableSpec) -> tuple[np.ndarray, np.ndarray | None]:
    rows = np.random.default_rng(0).normal(size=(LENGTH, DIM)).astype(np.float32)
    return rows, np.zeros_like(rows) if spec.has_slots else None


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("all_of_them", [False, True])
def test_they_move_as_the_rows_of_a_table_do(optimizer: RowOptimizerSpec, all_of_them: bool) -> None:
    spec = TableSpec(name="t", dim=DIM, optimizer=optimizer, num_rows=LENGTH)
    rows, slots = given(spec)
    table = RowTable(spec, np.arange(ops.NUM_BUCKETS))
    table.assign(np.arange(LENGTH), rows)
    random = np.random.default_rng(1)
    for step in range(4):
        numbers = np.arange(LENGTH) if all_of_them else random.permutation(LENGTH)[:77]
        gradients = random.normal(size=(len(numbers), DIM)).astype(np.float32)
        lr, chosen = 0.1 / (step + 1), None if all_of_them else numbers
        step_optimizer = replace(optimizer, lr=lr)
        assert array_update.update(spec, rows, slots, chosen, gradients, optimizer=step_optimizer, scale=0.5) == 0
        table.push(numbers, gradients, lr=lr, scale=0.5)
    expected = np.empty_like(rows)
    table.pull(np.arange(LENGTH), expected)
    np.testing.assert_array_equal(rows, expected)
    order = random.permutation(LENGTH)
    out = np.empty_like(rows)
    array_update.gather(rows, order, out)
    np.testing.assert_array_equal(out, rows[order])


def test_rows_that_lie_anywhere_are_rounded_as_their_ids_say() -> None:
    spec = TableSpec(name="t", dim=DIM, optimizer=SGD(0.1), dtype="bfloat16", seed=3)
    table = RowTable(spec, np.arange(ops.NUM_BUCKETS))
    ids, numbers = np.array([7, 10**11, 3]), np.array([2, 0, 4])
    rows, steps = np.zeros((5, DIM), spec.numpy_dtype), np.zeros(5, np.int64)
    table.assign(ids, rows[numbers])
    for gradients in np.random.default_rng(1).normal(size=(4, 3, DIM)).astype(np.float32):
        settings = {"optimizer": spec.optimizer, "scale": 0.5, "steps": steps, "ids": ids}
        assert array_update.update(spec, rows, None, numbers, gradients, **settings) == 0
        table.push(ids, gradients, lr=0.1, scale=0.5)
    expected = np.empty((3, DIM), spec.numpy_dtype)
    table.pull(ids, expected)
    np.testing.assert_array_equal(rows[numbers], expected)
    with pytest.raises(ValueError, match="ids must be"):
        array_update.update(spec, rows, None, numbers, gradients, **{**settings, "ids": ids[:2]})


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_a_row_that_would_not_be_finite_stays_as_it_is_and_is_counted(bad: float) -> None:
    spec = TableSpec(name="t", dim=DIM, optimizer=SparseMomentum(10.0), num_rows=LENGTH)
    rows, slots = given(spec)
    assert slots is not None
    gradients = np.ones((3, DIM), np.float32)
    gradients[1, 7] = bad
    before = rows.copy()
    numbers = np.array([5, 9, 2])
    assert array_update.update(spec, rows, slots, numbers, gradients, optimizer=spec.optimizer, scale=1.0) == 1
    np.testing.assert_array_equal(rows[9], before[9])
    assert not slots[9].any()
    assert (rows[[5, 2]] != before[[5, 2]]).all() and (slots[[5, 2]] == 1).all()


@pytest.mark.parametrize("number", [-1, LENGTH])
def test_a_number_outside_is_refused_before_anything_changes(number: int) -> None:
    spec = TableSpec(name="t", dim=DIM, optimizer=SGD(1.0), num_rows=LENGTH)
    rows, _ = given(spec)
    before = rows.copy()
    numbers = np.array([3, number])
    with pytest.raises(ValueError, match="outside the rows"):
        array_update.update(
            spec, rows, None, numbers, np.ones((2, DIM), np.float32), optimizer=spec.optimizer, scale=1.0
        )
    with pytest.raises(ValueError, match="outside the rows"):
        array_update.gather(rows, numbers, np.empty((2, DIM), np.float32))
    np.testing.assert_array_equal(rows, before)
