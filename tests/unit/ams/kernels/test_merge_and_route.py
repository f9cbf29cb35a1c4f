"""Merging repeated ids, grouping by shard, scattering answers, finite checks: equal to the reference."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.kernels import ops
from geartrain.ams.values.errors import InvalidArgument, InvalidIds
from tests.specification import ops as reference

FLOATS = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
few_ids = st.lists(st.integers(0, 12) | st.integers(0, 2**63 - 1), max_size=60).map(lambda x: np.array(x, np.int64))


@settings(max_examples=60, deadline=None)
@given(ids=few_ids, dim=st.sampled_from([1, 7, 33]), dtype=st.sampled_from(FLOATS))
def test_merged_rows_are_summed_in_the_callers_order(ids: np.ndarray, dim: int, dtype: np.dtype) -> None:
    rows = np.random.default_rng(len(ids)).standard_normal((len(ids), dim)).astype(dtype)
    distinct, inverse, sums = ops.merge_duplicates(ids, rows)
    expected_ids, expected_inverse, expected_sums = reference.merge_duplicates(ids, rows)
    np.testing.assert_array_equal(distinct, expected_ids)
    np.testing.assert_array_equal(inverse, expected_inverse)
    assert sums is not None
    np.testing.assert_array_equal(sums.astype(np.float32), expected_sums)


def test_distinct_ids_are_not_copied() -> None:
    ids, rows = np.arange(5), np.ones((5, 2), np.float16)
    distinct, inverse, same = ops.merge_duplicates(ids, rows)
    assert distinct is ids and same is rows and inverse.tolist() == [0, 1, 2, 3, 4]
    assert ops.merge_duplicates(np.array([4, 4]))[2] is None


def test_many_ids_merge_as_numpy_says() -> None:
    ids = np.random.default_rng(0).integers(0, 30_000, 100_000)
    distinct, inverse, _ = ops.merge_duplicates(ids)
    np.testing.assert_array_equal(distinct[inverse], ids)
    assert len(distinct) == len(np.unique(ids))


@settings(max_examples=60, deadline=None)
@given(ids=few_ids, dense=st.booleans(), num_shards=st.integers(1, 5))
def test_routing_groups_ids_by_shard_and_keeps_their_order(ids: np.ndarray, dense: bool, num_shards: int) -> None:
    bucket_to_shard = np.random.default_rng(num_shards).integers(0, num_shards, 4096).astype(np.uint16)
    order, counts = ops.route(ids, bucket_to_shard, dense, num_shards)
    expected_order, expected_counts = reference.route(ids, bucket_to_shard, dense, num_shards)
    np.testing.assert_array_equal(order, expected_order)
    np.testing.assert_array_equal(counts, expected_counts)


def test_routing_checks_its_map() -> None:
    ids = np.arange(3)
    with pytest.raises(InvalidArgument, match="uint16"):
        ops.route(ids, np.zeros(4096, np.int64), True)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="names shard 3"):
        ops.route(ids, np.full(4096, 3, np.uint16), True, num_shards=3)
    with pytest.raises(InvalidIds, match="float64"):
        ops.route(np.ones(3), np.zeros(4096, np.uint16), True)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_non_finite_value_is_found(dtype: np.dtype, bad: float) -> None:
    values = np.random.default_rng(0).standard_normal((100, 97)).astype(dtype)
    values[0, 0] = ml_dtypes.finfo(dtype).max
    assert ops.all_finite(values)
    for place in (9699, 4096, 4095, 0):
        values.reshape(-1)[place] = bad
        assert ops.first_non_finite(values) == place
    assert ops.all_finite(np.empty(0, dtype))


def test_splitmix64_equals_its_published_sequence() -> None:
    """First outputs of the author's splitmix64.c seeded with 1234567."""
    state = np.uint64(1234567) + np.arange(3, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert ops.splitmix64(state).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]
