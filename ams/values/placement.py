"""Placement of ids: id → bucket (of 4096) → shard. Pure functions; the scheduler owns the second arrow.

The scheduler makes that map, a shard for each bucket, and gives it a version (``ams/scheduler/state.py``); other
processes receive it from the scheduler, or from the snapshot of the rows. ``merge_route.cpp`` routes many ids at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels import ops
from geartrain.ams.values.specs import Ids

NUM_BUCKETS = 4096
MAX_SHARDS = NUM_BUCKETS

BucketShards = npt.NDArray[np.uint16]
"""[4096]: shard of each bucket."""
ONE_OWNER: BucketShards = np.zeros(NUM_BUCKETS, np.uint16)
"""Map of a single shard."""


@dataclass(frozen=True, eq=False)
class BucketMap:
    """Map of buckets to shards, with its version in the cluster."""

    version: int
    """Number of the map among those of the cluster, from 1."""
    bucket_shards: BucketShards

    def is_as(self, other: BucketMap) -> bool:
        """Return whether it is the same map."""
        return self.version == other.version and np.array_equal(self.bucket_shards, other.bucket_shards)


def _bits_reversed() -> Ids:
    order = np.zeros(1, np.int64)
    while len(order) < NUM_BUCKETS:
        order = np.concatenate([2 * order, 2 * order + 1])
    order.setflags(write=False)
    return order


BUCKET_ORDER: Ids = _bits_reversed()
"""[4096]: order of the buckets for cutting ranges, for shards and for blocks of snapshots: by reversed bits (van der
Corput's sequence). So a range has its share, to a few, of any run of ids of a dense table, also of one with fewer rows
than buckets. Its own inverse: ``BUCKET_ORDER[b]`` is also the place of bucket b.
"""


def even_placement(num_shards: int) -> BucketShards:
    """Return the map of a new cluster: a range of :data:`BUCKET_ORDER` for each shard, of equal size to one bucket.

    Ranges, so that on another number of shards most buckets keep their neighbours, and one shard reads a block of a
    snapshot. For the scheduler, and for plans of future clusters: other processes receive a map.
    """
    return (BUCKET_ORDER * num_shards // NUM_BUCKETS).astype(np.uint16)


def bucket_ranges(owned: Ids, count: int) -> list[tuple[int, int]]:
    """Cut the buckets ``owned`` into ``count`` ranges of :data:`BUCKET_ORDER`, equal in number to one bucket.

    Returns the first and last place of each range; fewer ranges if there are fewer buckets.
    """
    places = np.sort(BUCKET_ORDER[owned])
    return [(int(part[0]), int(part[-1])) for part in np.array_split(places, count) if len(part)]


def buckets_between(first: int, last: int) -> npt.NDArray[np.bool_]:
    """Return a mask [4096] of the buckets at the places ``first`` to ``last`` of :data:`BUCKET_ORDER`."""
    return (first <= BUCKET_ORDER) & (last >= BUCKET_ORDER)


def placement_to_bytes(bucket_shards: BucketShards) -> bytes:
    """Return the bytes of the map for messages and files: uint16, little-endian."""
    return bucket_shards.astype("<u2").tobytes()


def placement_from_bytes(data: bytes) -> BucketShards:
    """Return the map of :func:`placement_to_bytes`. Raises ValueError if it does not place every bucket."""
    if len(data) != 2 * NUM_BUCKETS:
        raise ValueError(f"it places {len(data) // 2} buckets, not {NUM_BUCKETS}")
    return np.frombuffer(data, "<u2").astype(np.uint16)


def buckets_of_shard(bucket_shards: BucketShards, shard: int) -> Ids:
    """Return the buckets that ``shard`` owns, ascending."""
    return np.flatnonzero(bucket_shards == shard).astype(np.int64)


def bucket_of(ids: Ids, *, dense: bool) -> Ids:
    """Return the bucket of each id: id mod 4096 in a dense table, the top 12 bits of splitmix64(id) in a hashed one."""
    if dense:
        return ids % NUM_BUCKETS
    return (ops.splitmix64(ids) >> np.uint64(52)).astype(np.int64)


def split_by_shard(
    ids: Ids, bucket_shards: BucketShards, num_shards: int, *, dense: bool
) -> list[tuple[int, Ids | None]]:
    """Group ``ids`` by shard.

    Returns (shard, positions) for each shard that owns any: ``ids[positions]`` are its ids, in their order. A single
    shard gets ``None`` for all ids unchanged, so that nothing is copied.
    """
    if num_shards == 1:
        return [(0, None)]
    order, counts = ops.route(ids, bucket_shards, dense=dense, num_shards=num_shards)
    ends = np.cumsum(counts)
    return [
        (shard, order[ends[shard] - counts[shard] : ends[shard]]) for shard in range(num_shards) if counts[shard] > 0
    ]
