"""Rows distributed like trained class centers: every class has a few similar ones, and most are far away.

Legend: C rows, D width.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

ROWS_OF_A_CLUSTER = 50
SPREAD = 0.8
_BLOCK = 50_000


def clustered_blocks(num_rows: int, dim: int, *, seed: int = 0) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    """Yield (first row, unit rows [N, D]) of blocks that make up all rows; at most one is in memory.

    A row is the normalised sum of the normal direction of one of C / 50 clusters, drawn at random, and normal noise of
    0.8 times its length: rows of one cluster have cosines near 0.61, others near 0.
    """
    clusters = clusters_of(num_rows, seed=seed)
    random = np.random.default_rng((seed, 1))
    centers = random.standard_normal((_num_clusters(num_rows), dim), np.float32)
    for start in range(0, num_rows, _BLOCK):
        count = min(_BLOCK, num_rows - start)
        rows = random.standard_normal((count, dim), np.float32)
        rows *= np.float32(SPREAD)
        rows += centers[clusters[start : start + count]]
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        yield start, rows


def clusters_of(num_rows: int, *, seed: int = 0) -> npt.NDArray[np.int64]:
    """Return the cluster [C] of each row."""
    return np.random.default_rng((seed, 0)).integers(_num_clusters(num_rows), size=num_rows)


def _num_clusters(num_rows: int) -> int:
    return max(1, num_rows // ROWS_OF_A_CLUSTER)


def clustered_rows(num_rows: int, dim: int, *, seed: int = 0) -> npt.NDArray[np.float32]:
    """Return all rows, float32 [C, D]."""
    rows = np.empty((num_rows, dim), np.float32)
    for start, block in clustered_blocks(num_rows, dim, seed=seed):
        rows[start : start + len(block)] = block
    return rows
