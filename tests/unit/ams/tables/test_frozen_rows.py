"""Rows as they were at one moment, read while writes go on."""

from __future__ import annotations

from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.errors import InvalidIds, InvalidRows, NonFinite
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec, SparseMomentum
from geartrain.ams.values.placement import bucket_of
from geartrain.ams.values.specs import TableSpec
from tests.support.row_tables import rest_of

DIM = 3
ALL_BUCKETS = np.arange(4096)


def make_table(num_rows: int | None, optimizer: RowOptimizerSpec | None = None, **spec: Any) -> RowTable:
    optimizer = SparseMomentum(lr=0.5, momentum=0.5) if optimizer is None else optimizer
    return RowTable(TableSpec(name="t", dim=DIM, optimizer=optimizer, num_rows=num_rows, **spec), ALL_BUCKETS)


def write(table: RowTable, ids: list[int], seed: int, *, assigns: bool = False) -> None:
    keys = np.array(sorted(set(ids)), np.int64)
    values = np.random.default_rng(seed).standard_normal((len(keys), DIM)).astype(np.float32)
    if assigns:
        table.assign(keys, values)
    else:
        table.push(keys, values)


IDS = st.lists(st.integers(0, 199), max_size=30)
WRITES = st.lists(st.tuples(IDS, st.booleans(), st.integers(0, 5)), max_size=6)


@settings(deadline=None, max_examples=150)
@given(
    num_rows=st.sampled_from([None, 200]),
    rounds=st.lists(st.tuples(WRITES, st.sampled_from(["kept", "given up"]), st.integers(0, 9)), max_size=6),
    forgotten=st.lists(st.integers(0, 6), max_size=3),
)
def test_a_freeze_since_a_moment_holds_the_rows_written_since_whatever_was_forgotten_between(
    num_rows: int | None, rounds: list[Any], forgotten: list[int]
) -> None:
    table = make_table(num_rows)
    written: dict[int, set[int]] = {table.latest_moment: set()}
    for number, (writes, end, asked) in enumerate(rounds):
        for ids, assigns, _ in writes:
            write(table, ids, number, assigns=assigns)
            for since in written.values():
                since.update(ids)
        moment = sorted(written)[asked % len(written)] if written else None
        table.freeze(since=moment)
        if moment is not None:
            assert set(rest_of(table, 7)) == written[moment]
        written[table.latest_moment] = set()
        if end != "kept":
            del written[table.latest_moment]
        table.thaw(kept=end == "kept")
        for gone in forgotten:
            if number == gone and len(written) > 1:
                table._store.forget_moment(first := sorted(written)[gone % len(written)])
                del written[first]
                with pytest.raises(ValueError, match="does not know"):
                    table.freeze(since=first)
    for moment, ids in written.items():
        table.freeze(since=moment)
        assert set(rest_of(table, 7)) == ids
        table.thaw(kept=False)


def test_bad_rows_are_refused_and_nothing_is_restored() -> None:
    table = make_table(200)
    rows = np.ones((2, DIM), np.float32)
    bad = rows.copy()
    bad[1, 1] = np.nan
    ids = np.array([1, 2])
    for args, error in (
        ((ids, rows, None), InvalidRows),
        ((ids, rows[:1], rows), InvalidRows),
        ((ids, bad, rows), NonFinite),
        ((ids, rows, bad), NonFinite),
        ((np.array([1, 200]), rows, rows), InvalidIds),
    ):
        with pytest.raises(error):
            table.restore(*args)
    assert table.num_present == 0


def test_a_table_is_frozen_once_at_a_time() -> None:
    table = make_table(None)
    table.freeze()
    with pytest.raises(ValueError, match="frozen already"):
        table.freeze()
    table.thaw(kept=False)
    table.thaw(kept=False)
    assert table.freeze() == 0


def test_memory_for_copies_serves_the_next_freeze_and_goes_when_it_is_not_needed() -> None:
    count, dim = 40_000, 256  # 80 MB of rows and slots
    table = RowTable(TableSpec(name="t", dim=dim, optimizer=SparseMomentum(lr=0.1), num_rows=count), ALL_BUCKETS)
    ids, gradients = np.arange(count), np.ones((count, dim), np.float32)
    table.push(ids, gradients)
    process = psutil.Process()

    def frozen_push(rows: int) -> tuple[int, int]:
        """Bytes that the process grew by while frozen, and from before to after."""
        before = process.memory_info().rss
        table.freeze()
        table.push(ids[:rows], gradients[:rows])
        during = process.memory_info().rss
        table.thaw(kept=True)
        return during - before, process.memory_info().rss - before

    first, second, small = frozen_push(count), frozen_push(count), frozen_push(10)
    assert first[0] > 60e6
    assert second[0] < 10e6, "the second freeze took fresh memory"
    assert small[1] < -30e6, "memory that was not needed was kept"


@pytest.mark.parametrize("num_rows", [None, 500_000])
def test_rows_of_some_buckets_are_read_first_and_each_once(num_rows: int | None) -> None:
    table = make_table(num_rows)
    ids = np.random.default_rng(0).choice(500_000, 300_000, replace=False)  # more than are looked at at once
    table.assign(ids, np.repeat(ids[:, None], DIM, axis=1).astype(np.float32))
    assert table.freeze() == len(ids)
    buckets = bucket_of(ids, dense=num_rows is not None)
    for wanted in (np.arange(4096) == 4095, np.arange(4096) % 3 == 0, np.arange(4096) < 2000, np.arange(4096) >= 0):
        part: list[int] = []
        while len((read := table.read_frozen(20_000, wanted)).ids):
            assert np.all(wanted[bucket_of(read.ids, dense=num_rows is not None)])
            np.testing.assert_array_equal(read.rows[:, 0], read.ids.astype(np.float32))
            part += read.ids.tolist()
            table.assign(ids[:1000], np.full((1000, DIM), -1, np.float32))  # beside it
        assert sorted(part) == sorted(ids[wanted[buckets]].tolist())
        ids, buckets = ids[~wanted[buckets]], buckets[~wanted[buckets]]
    table.thaw(kept=True)
