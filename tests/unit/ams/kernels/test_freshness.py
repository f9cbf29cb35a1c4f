"""Freshness of cached entries against its specification."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.ams.kernels.freshness import judge
from tests.specification import position_lru as reference_lru

EDGES = np.array([0.5, 1.0, 8.0])
entry = st.tuples(
    st.integers(-5, 40) | st.sampled_from([-(2**63), 2**63 - 1]),
    st.sampled_from([-np.inf, np.nan, 0.0]) | st.floats(-30, 30) | st.sampled_from([8.0, 9.0, 9.5, 10.0, 11.0, 18.0]),
)


@settings(max_examples=100, deadline=None)
@given(
    entries=st.lists(entry, min_size=1, max_size=30),
    dense_version=st.integers(0, 40),
    expire_seconds=st.sampled_from([0.0, 1.0, 8.5, np.inf]),
    max_version_lag=st.none() | st.integers(0, 20),
    through_positions=st.booleans(),
)
def test_entries_are_judged_as_the_specification_says(
    entries: list[tuple[int, float]],
    dense_version: int,
    expire_seconds: float,
    max_version_lag: int | None,
    through_positions: bool,
) -> None:
    versions, times = np.array([entry[0] for entry in entries]), np.array([entry[1] for entry in entries])
    rules = {
        "now": 10.0,
        "dense_version": dense_version,
        "expire_seconds": expire_seconds,
        "max_version_lag": max_version_lag,
        "age_edges": EDGES,
    }
    positions = np.random.default_rng(len(entries)).integers(0, len(entries), 20) if through_positions else None
    ages, lags = np.zeros(4, np.int64), np.zeros(5, np.int64)
    ours = judge(positions, versions, times, **rules, age_counts=ages, lag_counts=lags)
    chosen = slice(None) if positions is None else positions
    hits, absent, lagging, expected_ages, expected_lags = reference_lru.judge(
        versions[chosen], times[chosen], **rules, num_lags=5
    )
    np.testing.assert_array_equal(ours.hits, hits)
    np.testing.assert_array_equal(ours.versions, versions[chosen])
    np.testing.assert_array_equal(ours.times, times[chosen])
    assert (ours.num_hits, ours.num_absent, ours.num_lagging) == (hits.sum(), absent, lagging)
    np.testing.assert_array_equal(ages, expected_ages)
    np.testing.assert_array_equal(lags, expected_lags)


def test_a_position_outside_the_cache_is_refused() -> None:
    for position in (-1, 3):
        with pytest.raises(ValueError, match="a position is outside"):
            judge(
                np.array([0, position]),
                np.zeros(3, np.int64),
                np.zeros(3),
                now=0.0,
                dense_version=0,
                expire_seconds=1.0,
                max_version_lag=None,
                age_edges=EDGES,
                age_counts=np.zeros(4, np.int64),
                lag_counts=np.zeros(5, np.int64),
            )
