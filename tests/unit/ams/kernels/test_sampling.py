"""Class sampling: the first n of a keyed permutation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.kernels import ops
from geartrain.ams.kernels.ops import sample_ids
from geartrain.ams.values.errors import InvalidArgument
from tests.specification import ops as reference


@settings(max_examples=80, deadline=None)
@given(
    num_ids=st.integers(1, 3000) | st.integers(1, 2**62),
    share=st.floats(0, 1),
    seed=st.integers(-(2**63), 2**64 - 1),
    step=st.integers(0, 2**40),
)
def test_samples_are_distinct_in_range_and_equal_the_reference(
    num_ids: int, share: float, seed: int, step: int
) -> None:
    count = min(int(num_ids * share), 700)
    ids = sample_ids(num_ids, count, seed, step)
    assert ids.dtype == np.int64 and len(ids) == count
    assert np.all((ids >= 0) & (ids < num_ids)) and len(np.unique(ids)) == count
    np.testing.assert_array_equal(ids, reference.sample_permutation(num_ids, count, seed, step))


@pytest.mark.parametrize("num_ids", [1, 2, 3, 64, 65, 1000, 40_992])
def test_all_of_them_are_a_permutation(num_ids: int) -> None:
    np.testing.assert_array_equal(np.sort(sample_ids(num_ids, num_ids, 3, 4)), np.arange(num_ids))


def test_a_longer_sample_only_appends_and_parts_join() -> None:
    whole = sample_ids(10_000, 5000, 1, 2)
    np.testing.assert_array_equal(sample_ids(10_000, 100, 1, 2), whole[:100])
    np.testing.assert_array_equal(ops.sample_ids(10_000, 4000, 1, 2, first=1000), whole[1000:])


@pytest.mark.parametrize("num_ids", [10, 100, 1000])
def test_every_id_is_drawn_about_equally_often(num_ids: int) -> None:
    count, steps = num_ids // 10, 200_000 // num_ids
    drawn = np.concatenate([sample_ids(num_ids, count, 0, step) for step in range(steps)])
    expected = count * steps / num_ids
    chi_square = float(np.sum((np.bincount(drawn, minlength=num_ids) - expected) ** 2) / expected)
    assert chi_square < num_ids + 6 * np.sqrt(2 * num_ids)


def test_other_seeds_and_steps_give_other_samples() -> None:
    first = sample_ids(10**6, 1000, 0, 0)
    for seed, step in ((1, 0), (0, 1), (2**63, 0)):
        shared = np.intersect1d(first, sample_ids(10**6, 1000, seed, step))
        assert len(shared) < 15


@pytest.mark.parametrize(("num_ids", "count"), [(0, 0), (-1, 0), (2**62 + 1, 1), (5, 6), (5, -1)])
def test_sizes_out_of_range_are_refused(num_ids: int, count: int) -> None:
    with pytest.raises(InvalidArgument, match="must lie in"):
        sample_ids(num_ids, count, 0, 0)
