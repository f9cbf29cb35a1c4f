"""What can be known of a push before it is made."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.errors import InvalidArgument, InvalidIds, NonFinite
from geartrain.ams.values.optimizers.registry import SGD, Momentum, RowOptimizerSpec, SparseMomentum
from geartrain.ams.values.specs import Constant, DTypeName, TableSpec

IDS = np.arange(3)
RULES: list[RowOptimizerSpec] = [
    SGD(1.0, weight_decay=0.1),
    SparseMomentum(1.0, momentum=0.9),
    Momentum(1.0, momentum=0.9, nesterov=True),
]


def make(optimizer: RowOptimizerSpec = RULES[0], dtype: DTypeName = "float32") -> RowTable:
    spec = TableSpec(name="t", dim=2, optimizer=optimizer, num_rows=10, dtype=dtype, initializer=Constant(0.0))
    return RowTable(spec, np.arange(4096))


def rows(table: RowTable) -> np.ndarray:
    out = np.empty((3, 2), table.spec.numpy_dtype)
    table.pull(IDS, out)
    return out


def test_a_check_changes_nothing() -> None:
    table = make()
    table.check_push(IDS, np.ones((3, 2), np.float32))
    assert table.num_present == 0
    assert not rows(table).any()


def test_making_room_creates_no_row() -> None:
    table = make(SparseMomentum(1.0))
    table.make_room(IDS)
    assert table.num_present == 0
    with pytest.raises(InvalidIds):
        table.make_room(np.array([10]))
    assert table.push(IDS, np.ones((3, 2), np.float32)) == 3


@pytest.mark.parametrize("largest", [np.inf, np.nan, 3.5e38, 1e300])
def test_no_bound_means_no_promise(largest: float) -> None:
    assert not make().cannot_overflow(largest)


@pytest.mark.parametrize(("lr", "scale"), [(np.nan, 1.0), (-1.0, 1.0), (1.0, np.inf)])
def test_factors_out_of_range_are_refused(lr: float, scale: float) -> None:
    with pytest.raises(InvalidArgument):
        make().cannot_overflow(1.0, lr=lr, scale=scale)


@settings(max_examples=150, deadline=None)
@given(
    rule=st.sampled_from(RULES),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    first=st.floats(0, 2.0**126, width=32),
    largest=st.floats(0, 2.0**127, width=32),
    scale=st.floats(-4, 4, width=32),
    signs=st.lists(st.sampled_from([-1.0, 0.3, 1.0]), min_size=6, max_size=6),
)
def test_a_promise_is_kept(
    rule: RowOptimizerSpec, dtype: DTypeName, first: float, largest: float, scale: float, signs: list[float]
) -> None:
    table = make(rule, dtype)
    unit = np.array(signs, np.float32).reshape(3, 2)
    try:
        table.push(IDS, unit * np.float32(first), lr=1.0)
    except NonFinite:
        return
    if table.cannot_overflow(largest, lr=1.0, scale=scale):
        gradients = unit * np.float32(largest)
        table.check_push(IDS, gradients, lr=1.0, scale=scale)
        table.push(IDS, gradients, lr=1.0, scale=scale)
