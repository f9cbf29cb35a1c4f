"""Rows that are removed; see also test_any_calls.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.errors import InvalidIds
from geartrain.ams.values.optimizers.registry import Adam, RowOptimizerSpec, SparseMomentum
from geartrain.ams.values.specs import Ids, TableSpec
from tests.support.row_tables import pulled

DIM = 2
NUM_IDS = 40
EVERY = np.arange(NUM_IDS)
ALL_BUCKETS = np.arange(4096)


def make_table(num_rows: int | None, optimizer: RowOptimizerSpec | None = None, **spec: Any) -> RowTable:
    optimizer = SparseMomentum(lr=0.5, momentum=0.5) if optimizer is None else optimizer
    return RowTable(TableSpec(name="t", dim=DIM, optimizer=optimizer, num_rows=num_rows, **spec), ALL_BUCKETS)


def num_distinct(ids: Ids) -> Ids:
    return np.unique(np.asarray(ids, np.int64))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_rows", [None, NUM_IDS])
def test_a_row_that_comes_back_begins_anew(num_rows: int | None, dtype: Any) -> None:
    table, twin = (make_table(num_rows, Adam(0.1), dtype=dtype) for _ in range(2))
    gradients = np.ones((NUM_IDS, DIM), np.float32)
    for _ in range(3):
        table.push(EVERY, gradients)
    assert table.remove(EVERY) == NUM_IDS
    assert table.num_present == 0
    for item in (table, twin):
        item.push(EVERY[::-1].copy(), gradients)
    assert np.array_equal(pulled(table, EVERY), pulled(twin, EVERY)), "its slots, or its updates, were there still"


@pytest.mark.parametrize("num_rows", [None, NUM_IDS])
def test_rows_that_move_untouched_are_as_never_pushed_once_removed(num_rows: int | None) -> None:
    optimizer = SparseMomentum(lr=0.5, momentum=0.5, weight_decay=0.1, untouched="elapsed")
    table, twin = make_table(num_rows, optimizer), make_table(num_rows, optimizer)
    some = np.ones((4, DIM), np.float32)
    for _ in range(3):
        table.push(EVERY[:4], some)
        twin.push(EVERY[2:4], some[:2])
    assert table.remove(EVERY[:2]) == 2
    assert np.array_equal(pulled(table, EVERY), pulled(twin, EVERY))
    for item in (table, twin):
        item.push(EVERY[:1], some[:1])
        item.push(EVERY[3:4], some[:1])
    assert np.array_equal(pulled(table, EVERY), pulled(twin, EVERY))


def test_memory_of_rows_that_went_is_used_again() -> None:
    table = make_table(None)
    random = np.random.default_rng(1)
    for _ in range(30):
        ids = num_distinct(random.integers(0, 2**40, 2_000))
        table.push(ids, np.ones((len(ids), DIM), np.float32))
        memory = table.memory_bytes
        assert table.remove(ids) == len(ids)
    once = make_table(None)
    once.push(ids, np.ones((len(ids), DIM), np.float32))
    assert memory <= 1.05 * once.memory_bytes


def test_the_index_finds_what_is_left_while_it_grows() -> None:
    table = make_table(None)
    random = np.random.default_rng(2)
    there: set[int] = set()
    for number in range(60):
        new = num_distinct(random.integers(0, 300_000, 4_000))
        table.push(new, np.ones((len(new), DIM), np.float32))
        there |= set(new.tolist())
        share = 0.3 if number < 40 else 0.8
        old = num_distinct(random.choice(sorted(there), int(share * 4_000)))
        assert table.remove(old) == len(old)
        there -= set(old.tolist())
    present = np.zeros(300_000, np.bool_)
    table.pull(np.arange(300_000), np.empty((300_000, DIM), np.float32), present=present)
    assert set(np.flatnonzero(present).tolist()) == there


def test_what_was_removed_is_remembered_by_those_that_were_there() -> None:
    table = make_table(None)
    table.push(EVERY, np.ones((NUM_IDS, DIM), np.float32))
    table.freeze()
    table.thaw(kept=True)
    moment = table.latest_moment
    for number in range(100):
        ids = NUM_IDS * (number + 1) + EVERY
        table.push(ids, np.ones((NUM_IDS, DIM), np.float32))
        table.remove(ids)
        table.remove(EVERY[number : number + 1])
    table.freeze(since=moment)
    removed = np.concatenate(list(table.frozen_removed()))
    assert len(removed) <= 2 * NUM_IDS, "rows that came and went are nobody's"
    assert set(EVERY.tolist()) <= set(removed.tolist())


def test_an_id_that_cannot_be_is_refused_and_nothing_goes() -> None:
    table = make_table(NUM_IDS)
    table.push(EVERY, np.ones((NUM_IDS, DIM), np.float32))
    with pytest.raises(InvalidIds, match=r"ids\[1\] of table 't' is 40"):
        table.remove(np.array([1, NUM_IDS]))
    assert table.num_present == NUM_IDS
