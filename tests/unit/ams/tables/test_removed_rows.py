"""Rows that are removed: whatever happens beside it, a table is what a dictionary would be."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.tables.stored_rows import StoredRows
from geartrain.ams.values.errors import InvalidIds
from geartrain.ams.values.optimizers.registry import Adam, RowOptimizerSpec, SparseMomentum
from geartrain.ams.values.specs import Ids, TableSpec

DIM = 2
NUM_IDS = 40
EVERY = np.arange(NUM_IDS)
ALL_BUCKETS = np.arange(4096)
Contents = dict[int, tuple[list[float], list[float]]]


def make_table(num_rows: int | None, optimizer: RowOptimizerSpec | None = None, **spec: Any) -> RowTable:
    optimizer = SparseMomentum(lr=0.5, momentum=0.5) if optimizer is None else optimizer
    return RowTable(TableSpec(name="t", dim=DIM, optimizer=optimizer, num_rows=num_rows, **spec), ALL_BUCKETS)


def pulled(table: RowTable, ids: Ids) -> npt.NDArray[Any]:
    out = np.empty((len(ids), DIM), table.spec.numpy_dtype)
    table.pull(ids, out)
    return out


def num_distinct(ids: Ids) -> Ids:
    return np.unique(np.asarray(ids, np.int64))


class Model:
    """A table as a dictionary of rows and momenta."""

    def __init__(self, initial: npt.NDArray[np.float32]) -> None:
        self.initial = initial
        self.rows: dict[int, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]] = {}

    def push(self, ids: Ids, gradients: npt.NDArray[np.float32]) -> int:
        new = sum(int(i) not in self.rows for i in ids)
        for i, gradient in zip(ids.tolist(), gradients, strict=True):
            row, momentum = self.rows.get(i, (self.initial[i], np.zeros(DIM, np.float32)))
            momentum = np.float32(0.5) * momentum + gradient
            self.rows[i] = row - np.float32(0.5) * momentum, momentum
        return new

    def assign(self, ids: Ids, rows: npt.NDArray[np.float32]) -> int:
        new = sum(int(i) not in self.rows for i in ids)
        self.rows |= {i: (row, np.zeros(DIM, np.float32)) for i, row in zip(ids.tolist(), rows, strict=True)}
        return new

    def remove(self, ids: Ids) -> int:
        return sum(self.rows.pop(int(i), None) is not None for i in ids)

    def contents(self) -> Contents:
        return {i: (row.tolist(), momentum.tolist()) for i, (row, momentum) in self.rows.items()}

    def expected(self) -> npt.NDArray[np.float32]:
        return np.array([self.rows[i][0] if i in self.rows else self.initial[i] for i in range(NUM_IDS)])


def kept(parts: list[StoredRows]) -> Contents:
    found: Contents = {}
    for part in parts:
        assert part.slots is not None
        for i, row, slot in zip(part.ids.tolist(), part.rows.tolist(), part.slots.tolist(), strict=True):
            assert i not in found, "a row was read twice"
            found[i] = (row, slot)
    return found


def rest_of(table: RowTable) -> list[StoredRows]:
    parts = []
    while len((part := table.read_frozen(5)).ids):
        parts.append(StoredRows(*(None if one is None else one.copy() for one in part)))  # type: ignore[arg-type]
    return parts


IDS = st.lists(st.integers(0, NUM_IDS - 1), max_size=15)
OPERATION = st.one_of(
    st.tuples(st.sampled_from(["push", "assign", "remove", "remove"]), IDS),
    st.tuples(st.sampled_from(["freeze", "freeze", "read", "thaw", "give up"]), st.just([])),
)


@settings(deadline=None, max_examples=200)
@given(num_rows=st.sampled_from([None, NUM_IDS]), operations=st.lists(OPERATION, max_size=30))
def test_a_table_is_a_dictionary(num_rows: int | None, operations: list[tuple[str, list[int]]]) -> None:
    table, follower = make_table(num_rows), make_table(num_rows)
    model = Model(pulled(table, EVERY).copy())
    frozen: Contents | None = None
    read: list[StoredRows] = []
    moment, removed = 0, np.empty(0, np.int64)
    for number, (operation, given_ids) in enumerate([*operations, ("thaw", []), ("freeze", []), ("thaw", [])]):
        ids = num_distinct(np.array(given_ids, np.int64))
        values = np.random.default_rng(number).standard_normal((len(ids), DIM)).astype(np.float32)
        match operation:
            case "push":
                assert table.push(ids, values) == model.push(ids, values)
            case "assign":
                assert table.assign(ids, values) == model.assign(ids, values)
            case "remove":
                assert table.remove(np.array(given_ids, np.int64)) == model.remove(ids)
            case "freeze" if frozen is None:
                frozen, read = model.contents(), []
                table.freeze(since=moment)
                removed = np.concatenate([np.empty(0, np.int64), *table.frozen_removed(3)])
                next_moment = table.latest_moment
            case "read" if frozen is not None:
                part = table.read_frozen(4)
                read.append(StoredRows(*(None if one is None else one.copy() for one in part)))  # type: ignore[arg-type]
            case "give up" if frozen is not None:
                table.thaw(kept=False)
                frozen = None
            case "thaw" if frozen is not None:
                read += rest_of(table)
                assert kept(read).items() <= frozen.items(), "what a freeze holds is read as it was"
                table.thaw(kept=True)
                assert len(set(removed.tolist())) == len(removed)
                follower.remove(removed)
                for part in read:
                    follower.restore(*part)
                moment = next_moment
                follower.freeze()
                assert kept(rest_of(follower)) == frozen, "increments say what came, changed and went"
                follower.thaw(kept=True)
                frozen = None
        assert np.array_equal(pulled(table, EVERY), model.expected())
        assert table.num_present == len(model.rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_rows", [None, NUM_IDS])
def test_a_row_that_comes_back_begins_anew(num_rows: int | None, dtype: Any) -> None:
    table, twin = (make_table(num_rows, Adam(0.1), dtype=dtype) for _ in range(2))
    gradients = np.ones((NUM_IDS, DIM), np.float32)
    for _ in range(3):
        table.push(EVERY, gradients)
    assert table.remove(EVERY) == NUM_IDS
    assert table.num_present == 0
    for one in (table, twin):
        one.push(EVERY[::-1].copy(), gradients)
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
    for one in (table, twin):
        one.push(EVERY[:1], some[:1])
        one.push(EVERY[3:4], some[:1])
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
