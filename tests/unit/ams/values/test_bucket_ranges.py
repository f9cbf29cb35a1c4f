"""The map of a new cluster: ranges of buckets, spread evenly over any run of ids."""

from __future__ import annotations

import numpy as np
import pytest

from geartrain.ams.values.placement import (
    BUCKET_ORDER,
    NUM_BUCKETS,
    bucket_ranges,
    buckets_between,
    buckets_of_shard,
    even_placement,
    placement_from_bytes,
    placement_to_bytes,
)


def test_the_order_of_buckets_is_its_own_inverse() -> None:
    assert BUCKET_ORDER[:4].tolist() == [0, 2048, 1024, 3072]
    np.testing.assert_array_equal(BUCKET_ORDER[BUCKET_ORDER], np.arange(NUM_BUCKETS))


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 5, 7, 12, 64, 100, 101, 4096])
def test_every_shard_has_a_range_of_buckets_and_its_share_of_every_dense_table(num_shards: int) -> None:
    placement = even_placement(num_shards)
    counts = np.bincount(placement, minlength=num_shards)
    assert counts.max() - counts.min() <= 1
    assert np.all(np.diff(placement[BUCKET_ORDER].astype(int)) >= 0), "ranges, in the order of the shards"
    rows = np.cumsum(np.eye(num_shards, dtype=np.int64)[placement[:512]], axis=0)  # of a table of 1, 2, … 512 rows
    even = -(-np.arange(1, 513) // num_shards)
    assert np.all(rows.max(axis=1) <= even + (0 if num_shards & (num_shards - 1) == 0 else 4))


def test_ranges_hold_each_bucket_of_a_shard_once() -> None:
    owned = buckets_of_shard(even_placement(5), 3)
    ranges = bucket_ranges(owned, 8)
    marked = np.sum([buckets_between(first, last) for first, last in ranges], axis=0)
    assert len(ranges) == 8 and np.flatnonzero(marked).tolist() == owned.tolist() and marked.max() == 1
    assert bucket_ranges(owned[:3], 8) == [(place, place) for place in sorted(BUCKET_ORDER[owned[:3]].tolist())]
    assert bucket_ranges(owned[:0], 8) == []


def test_a_map_travels_and_half_a_map_does_not() -> None:
    data = placement_to_bytes(even_placement(300))
    np.testing.assert_array_equal(placement_from_bytes(data), even_placement(300))
    for cut in (b"", data[:-1], data[:-2], data + b"\0\0"):
        with pytest.raises(ValueError, match="buckets, not 4096"):
            placement_from_bytes(cut)
