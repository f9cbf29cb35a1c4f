"""How a server process uses its machine: memory and cores."""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20
_KEPT_BYTES = 256 << 20
_MOST_THREADS = 4


def threads_per_shard(num_shards: int) -> int:
    """Return how many threads a very large request to one of ``num_shards`` shards of this process may use."""
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // num_shards))


def keep_large_buffers() -> bool:
    """Let malloc recycle message-sized buffers instead of mapping fresh pages for each; return whether it agreed.

    A reply of 5 MB otherwise costs more page faults than copying. glibc only; the process keeps up to 256 MiB it no
    longer uses. Row slabs are mapped by themselves and not concerned.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))
