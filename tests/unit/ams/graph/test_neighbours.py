"""The table of neighbours and the active classes it gives: equal to the reference, checked, pure."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.graph.building.neighbours import NeighbourTable, id_dtype
from geartrain.ams.kernels.ops import sample_ids
from geartrain.ams.values.errors import InvalidArgument, InvalidIds
from tests.specification import ops as reference
from tests.support.plain_graph import table_of


@st.composite
def tables(draw: st.DrawFn) -> NeighbourTable:
    """Lists of uneven lengths, as those of a table cut per shard are."""
    num_classes = draw(st.integers(1, 40) | st.integers(3000, 9000))
    k = draw(st.integers(1, 6))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    lengths = random.integers(0, k + 1, num_classes)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = random.integers(0, num_classes, int(lengths.sum())).astype(draw(st.sampled_from([np.int32, np.int64])))
    return NeighbourTable(offsets, ids, k)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), table=tables(), seed=st.integers(-(2**63), 2**64 - 1), step=st.integers(0, 2**40))
def test_a_selection_equals_the_reference(data: st.DataObject, table: NeighbourTable, seed: int, step: int) -> None:
    labels = np.array(data.draw(st.lists(st.integers(0, table.num_classes - 1), max_size=30)), np.int64)
    budget = data.draw(st.integers(1, 60) | st.integers(1, 2 * table.num_classes))
    chosen = table.select(labels, budget, seed=seed, step=step)
    assert chosen.dtype == np.int64
    expected = reference.select_neighbours(table.offsets, table.neighbours, labels, budget, seed, step)
    np.testing.assert_array_equal(chosen, expected)
    assert len(chosen) == max(min(budget, table.num_classes), len(np.unique(labels)))
    assert np.all(np.diff(chosen) > 0) and np.isin(labels, chosen).all()


RING = table_of([[(i + 1) % 9, (i - 1) % 9, (i + 2) % 9] for i in range(9)], k=3)


def test_ranks_come_in_turn_and_a_cut_takes_the_least_similar() -> None:
    labels = np.array([7, 3, 3])
    for budget, expected in ((3, [3, 4, 7]), (4, [3, 4, 7, 8]), (5, [2, 3, 4, 7, 8]), (8, [0, 2, 3, 4, 5, 6, 7, 8])):
        assert RING.select(labels, budget, seed=0, step=0).tolist() == expected


def test_what_neighbours_leave_free_is_filled_by_the_sampler() -> None:
    table = table_of([[1]] + [[0]] * 99_999, k=1)
    filled = table.select(np.array([0]), 50, seed=5, step=6)
    others = [i for i in sample_ids(100_000, 60, 5, 6).tolist() if i > 1][:48]
    assert filled.tolist() == sorted([0, 1, *others])
    assert table.select(np.array([], np.int64), 5, seed=5, step=6).tolist() == sorted(sample_ids(100_000, 5, 5, 6))


def test_one_class_only_is_its_own_selection() -> None:
    table = table_of([[]], k=4)
    assert table.select(np.array([0, 0]), 1, seed=0, step=0).tolist() == [0]
    assert table.row(0).tolist() == []


@pytest.mark.parametrize("label", [-1, 9])
def test_a_label_outside_the_table_is_named(label: int) -> None:
    with pytest.raises(InvalidIds, match=rf"label {label} at index 1 .*\[0, 9\)"):
        RING.select(np.array([0, label]), 4, seed=0, step=0)
    with pytest.raises(InvalidIds, match=rf"class {label} .*\[0, 9\)"):
        RING.row(label)


@pytest.mark.parametrize("budget", [0, -3])
def test_a_budget_below_one_is_refused(budget: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"budget is {budget}; it must be at least 1"):
        RING.select(np.array([0]), budget, seed=0, step=0)


def test_a_table_that_contradicts_itself_is_refused() -> None:
    offsets, ids = np.array([0, 1, 2]), np.array([1, 0])
    with pytest.raises(InvalidArgument, match="k is 0"):
        NeighbourTable(offsets, ids, 0)
    with pytest.raises(InvalidArgument, match="from 0 to the number of neighbours 1"):
        NeighbourTable(offsets, ids[:1], 1)
    with pytest.raises(InvalidArgument, match="falls from"):
        NeighbourTable(np.array([0, 3, 2]), ids, 1)
    with pytest.raises(InvalidIds, match=r"neighbours lie in \[0, 2\]"):
        NeighbourTable(offsets, np.array([0, 2]), 1)
    with pytest.raises(InvalidArgument, match="int32"):
        NeighbourTable(offsets.astype(np.int32), ids, 1)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="not contiguous"):
        NeighbourTable(offsets, np.repeat(ids, 2)[::2], 1)


def test_ids_are_narrow_while_they_fit() -> None:
    assert id_dtype(2**31) is np.int32 and id_dtype(2**31 + 1) is np.int64
    assert RING.neighbours.dtype == np.int32 and RING.num_bytes == 10 * 8 + 27 * 4
