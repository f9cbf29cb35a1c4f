"""Which shard owns an id: id → bucket (of 4096) → shard. Pure functions; the scheduler owns the second arrow."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels import ops
from geartrain.ams.values.specs import Ids

NUM_BUCKETS = 4096
MAX_SHARDS = NUM_BUCKETS

BucketShards = npt.NDArray[np.uint16]


def even_placement(num_shards: int) -> BucketShards:
    """Return the shard of each bucket, [4096] uint16, when ``num_shards`` shards own the buckets in turn.

    In turn, so that a dense table of fewer rows than buckets is spread evenly too.
    """
    return (np.arange(NUM_BUCKETS) % num_shards).astype(np.uint16)


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
    """Say which of ``ids`` go to which shard.

    Returns (shard, positions) for each shard that owns any: ``ids[positions]`` are its ids, in their order. A single
    shard gets ``None`` for "all of them, as they are", so that nothing need be copied.
    """
    if num_shards == 1:
        return [(0, None)]
    order, counts = ops.route(ids, bucket_shards, dense=dense, num_shards=num_shards)
    ends = np.cumsum(counts)
    return [
        (shard, order[ends[shard] - counts[shard] : ends[shard]]) for shard in range(num_shards) if counts[shard] > 0
    ]
