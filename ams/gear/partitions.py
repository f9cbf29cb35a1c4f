"""Partitions of the id space: 64, which slow gears hold by stream leases of the scheduler."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels import ops
from geartrain.ams.values.specs import Ids

NUM_PARTITIONS = 64
_BUCKET_SHIFT, _BUCKETS_PER_PARTITION = 52, 64


def job_of(name: str) -> str:
    """Return the scheduler's job name whose data streams are the partitions of a dense part."""
    return f"gear/{name}"


def partitions_of(ids: Ids) -> npt.NDArray[np.int64]:
    """Return the partition, in [0, 64), of each id [K]: bucket // 64, where the bucket is splitmix64(id) >> 52."""
    buckets = (ops.splitmix64(ids) >> np.uint64(_BUCKET_SHIFT)).astype(np.int64)
    return buckets // _BUCKETS_PER_PARTITION
