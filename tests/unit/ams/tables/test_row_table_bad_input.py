"""Whatever is wrong with a call, the table says what and where, and no row changes; most can be known before."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.errors import InvalidArgument, InvalidIds, InvalidRows, NonFinite
from geartrain.ams.values.optimizers.registry import SGD, Momentum, RowOptimizerSpec, SparseMomentum
from geartrain.ams.values.specs import Constant, DTypeName, TableSpec
from tests.specification import ops as reference
from tests.support.row_tables import pulled

ALL_BUCKETS = np.arange(4096)
IDS = np.arange(6)
SPARSE = SparseMomentum(0.1)
ONES = np.ones((6, 4), np.float32)


def make(
    optimizer: RowOptimizerSpec = SPARSE,
    *,
    num_rows: int | None = None,
    dtype: DTypeName = "float32",
    slot_dtype: DTypeName = "float32",
    owned: np.ndarray = ALL_BUCKETS,
) -> RowTable:
    spec = TableSpec(name="sku", dim=4, optimizer=optimizer, num_rows=num_rows, dtype=dtype, slot_dtype=slot_dtype)
    return RowTable(spec, owned)


def assert_refused(table: RowTable, error: type[Exception], message: str, ids: Any, rows: Any, **how: Any) -> None:
    """Push, its check and assign must all raise and change nothing, then go on working."""
    before, present = pulled(table, IDS), table.num_present
    for call in (table.check_push, table.push):
        with pytest.raises(error, match=message):
            call(ids, rows, **how)
    if not how:
        with pytest.raises(error, match=message):
            table.assign(ids, rows)
    np.testing.assert_array_equal(pulled(table, IDS), before)
    assert table.num_present == present


@pytest.mark.parametrize("num_rows", [None, 100])
def test_illegal_ids_are_named_with_their_place(num_rows: int | None) -> None:
    table = make(num_rows=num_rows)
    table.push(IDS, ONES)
    bad = IDS.copy()
    bad[4] = -9
    assert_refused(table, InvalidIds, r"ids\[4\] of table 'sku' is -9; ids must be >= 0", bad, ONES)
    with pytest.raises(InvalidIds, match=r"ids\[4\]"):
        pulled(table, bad)
    if num_rows is not None:
        bad[4], bad[5] = 100, 2**62
        assert_refused(table, InvalidIds, r"ids\[4\] of table 'sku' is 100; ids must lie in \[0, 100\)", bad, ONES)


@pytest.mark.parametrize("num_rows", [None, 100_000])
def test_ids_of_foreign_buckets_are_refused(num_rows: int | None) -> None:
    buckets = reference.bucket_of(np.arange(50_000), num_rows is not None)
    ours, foreign = np.flatnonzero(buckets < 2048)[:6], np.flatnonzero(buckets >= 2048)[0]
    table = make(num_rows=num_rows, owned=np.arange(2048))
    table.push(ours, ONES)
    ids = ours.copy()
    ids[2] = foreign
    with pytest.raises(
        InvalidIds, match=rf"ids\[2\] of table 'sku' is {foreign}, whose bucket this shard does not own"
    ):
        table.push(ids, ONES)
    assert table.num_present == 6


@pytest.mark.parametrize(
    "ids", [IDS.astype(np.int32), IDS.astype(np.float64), IDS[None], list(range(6)), IDS.astype(">i8"), None]
)
def test_ids_of_another_type_or_shape_are_refused(ids: Any) -> None:
    assert_refused(make(), InvalidIds, "must be a numpy int64 vector", ids, ONES)


@pytest.mark.parametrize(
    "rows", [ONES[:5], ONES[:, :3], ONES[0], ONES.astype(np.float64), ONES.astype(np.int32), ONES.tolist(), None]
)
def test_rows_of_another_type_or_shape_are_refused(rows: Any) -> None:
    assert_refused(make(), InvalidRows, "of table 'sku' is", IDS, rows)


def test_assign_takes_only_the_tables_dtype() -> None:
    with pytest.raises(InvalidRows, match="float16; it must be a numpy array of float32"):
        make().assign(IDS, ONES.astype(np.float16))


def test_outputs_that_do_not_fit_are_refused_untouched() -> None:
    table, out = make(), np.zeros((6, 4), np.float32)
    for bad_out in (out[:5], np.zeros((6, 5), np.float32), out.astype(np.float16), np.zeros((4, 6), np.float32).T):
        with pytest.raises(InvalidRows):
            table.pull(IDS, bad_out)
    out.setflags(write=False)
    with pytest.raises(InvalidRows, match="writable"):
        table.pull(IDS, out)
    out.setflags(write=True)
    with pytest.raises(InvalidRows, match="present is"):
        table.pull(IDS, out, present=np.zeros(5, bool))
    assert not out.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_one_non_finite_value_refuses_the_whole_request(dtype: DTypeName, bad: float) -> None:
    table = make(dtype=dtype)
    table.assign(IDS, ONES.astype(table.spec.numpy_dtype))
    rows = ONES.astype(table.spec.numpy_dtype)
    rows[3, 2] = bad
    new_ids = IDS + 3
    assert_refused(table, NonFinite, r"of id 6 \(index 3\) in table 'sku'", new_ids, rows)


def test_a_scale_that_overflows_a_gradient_refuses_the_push() -> None:
    gradients = ONES.copy()
    gradients[1, 0] = 1e30
    assert_refused(make(), NonFinite, r"of id 1 \(index 1\)", IDS, gradients, scale=1e10)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e39])
def test_rates_must_be_finite(value: float) -> None:
    assert_refused(make(), InvalidArgument, "lr is", IDS, ONES, lr=value)
    assert_refused(make(), InvalidArgument, "scale is", IDS, ONES, scale=value)
    assert_refused(make(), InvalidArgument, "lr is -1", IDS, ONES, lr=-1)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "slot_dtype", "gradient", "lr"),
    [
        (SGD(1.0), "float16", "float32", 3e4, 1.0),
        (Momentum(1.0, nesterov=True), "bfloat16", "float32", 1e38, 1.0),
        (SparseMomentum(1.0), "float32", "float16", 6e4, 1e-3),
        (SGD(1.0), "float32", "float32", 3e38, 1.0),
    ],
)
def test_an_update_that_would_overflow_its_storage_is_refused(
    optimizer: RowOptimizerSpec, dtype: DTypeName, slot_dtype: DTypeName, gradient: float, lr: float
) -> None:
    """Small gradients for most ids, a large one for id 4 only: at some push its row or slot would become infinite."""
    table = make(optimizer, dtype=dtype, slot_dtype=slot_dtype)
    gradients = ONES * np.float32(1e-3)
    gradients[4] = gradient
    pushes = 0
    while pushes < 10:
        before = pulled(table, IDS)
        try:
            table.push(IDS, gradients, lr=lr)
        except NonFinite as error:
            assert "would carry id 4 (index 4)" in str(error)
            break
        pushes += 1
        assert np.all(np.isfinite(pulled(table, IDS).astype(np.float64)))
    assert 1 <= pushes < 10
    np.testing.assert_array_equal(pulled(table, IDS), before)
    table.push(IDS, ONES * np.float32(1e-3))


def test_a_refused_push_to_missing_rows_creates_none() -> None:
    table = make(SGD(1.0), dtype="float16")
    gradients = ONES.copy()
    gradients[5] = 1e5
    assert_refused(table, NonFinite, "would carry id 5", IDS, gradients, scale=2.0)
    assert table.num_present == 0


@pytest.mark.parametrize("owned", [[3, 2], [0, 0], [-1, 4], [5, 4096]])
def test_owned_buckets_must_ascend_within_range(owned: list[int]) -> None:
    with pytest.raises(InvalidArgument, match="must ascend"):
        make(owned=np.array(owned))


def test_a_shard_without_buckets_owns_nothing() -> None:
    table = make(owned=np.empty(0, np.int64), num_rows=50)
    with pytest.raises(InvalidIds, match="does not own"):
        table.push(IDS, ONES)
    assert table.num_present == 0


RULES: list[RowOptimizerSpec] = [
    SGD(1.0, weight_decay=0.1),
    SparseMomentum(1.0, momentum=0.9),
    Momentum(1.0, momentum=0.9, nesterov=True),
]


def narrow(optimizer: RowOptimizerSpec = RULES[0], dtype: DTypeName = "float32") -> RowTable:
    spec = TableSpec(name="t", dim=2, optimizer=optimizer, num_rows=10, dtype=dtype, initializer=Constant(0.0))
    return RowTable(spec, ALL_BUCKETS)


def test_a_check_changes_nothing() -> None:
    table = narrow()
    table.check_push(IDS[:3], np.ones((3, 2), np.float32))
    assert table.num_present == 0
    assert not pulled(table, IDS[:3]).any()


def test_making_room_creates_no_row() -> None:
    table = narrow(SparseMomentum(1.0))
    table.reserve(IDS[:3])
    assert table.num_present == 0
    with pytest.raises(InvalidIds):
        table.reserve(np.array([10]))
    assert table.push(IDS[:3], np.ones((3, 2), np.float32)) == 3


@pytest.mark.parametrize("largest", [np.inf, np.nan, 3.5e38, 1e300])
def test_no_bound_means_no_promise(largest: float) -> None:
    assert not narrow().cannot_overflow(largest)


@pytest.mark.parametrize(("lr", "scale"), [(np.nan, 1.0), (-1.0, 1.0), (1.0, np.inf)])
def test_factors_out_of_range_are_refused(lr: float, scale: float) -> None:
    with pytest.raises(InvalidArgument):
        narrow().cannot_overflow(1.0, lr=lr, scale=scale)


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
    table = narrow(rule, dtype)
    unit = np.array(signs, np.float32).reshape(3, 2)
    try:
        table.push(IDS[:3], unit * np.float32(first), lr=1.0)
    except NonFinite:
        return
    if table.cannot_overflow(largest, lr=1.0, scale=scale):
        gradients = unit * np.float32(largest)
        table.check_push(IDS[:3], gradients, lr=1.0, scale=scale)
        table.push(IDS[:3], gradients, lr=1.0, scale=scale)
