"""Freshness check of cached entries: the compiled inner loop of a cache, typed.

``judge`` of ``tests/specification/position_lru.py`` is the specification. C entries of the cache, N of one call.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels import _core


class FreshnessCheck(NamedTuple):
    """Result of the check of N entries."""

    versions: npt.NDArray[np.int64]
    """[N] version of each entry."""
    times: npt.NDArray[np.float64]
    """[N] time of each entry."""
    hits: npt.NDArray[np.bool_]
    """[N] whether each entry is a hit."""
    num_hits: int
    num_absent: int
    """Number of misses with time -inf."""
    num_lagging: int
    """Number of misses that are young enough, but too many versions away."""


def judge(
    positions: npt.NDArray[np.int64] | None,
    versions: npt.NDArray[np.int64],
    times: npt.NDArray[np.float64],
    *,
    now: float,
    dense_version: int,
    expire_seconds: float,
    max_version_lag: int | None,
    age_edges: npt.NDArray[np.float64],
    age_counts: npt.NDArray[np.int64],
    lag_counts: npt.NDArray[np.int64],
) -> FreshnessCheck:
    """Check entries ``positions`` [N] of ``versions`` and ``times`` [C]; None: all.

    An entry is a hit if |now − time| < expire_seconds and |dense_version − version| <= max_version_lag (None: any). Its
    age and lag are counted, in place: ages in ``age_counts`` [E + 1] between ascending ``age_edges`` [E], lags in
    ``lag_counts`` [L] by their number of bits, the last for L − 1 bits and more. About 5 ns an entry.
    """
    count = len(versions) if positions is None else len(positions)
    out_versions, out_times, hits = np.empty(count, np.int64), np.empty(count), np.empty(count, np.bool_)
    numbers = _core.judge(
        positions,
        versions,
        times,
        now,
        dense_version,
        expire_seconds,
        max_version_lag,
        out_versions,
        out_times,
        hits,
        age_edges,
        age_counts,
        lag_counts,
    )
    return FreshnessCheck(out_versions, out_times, hits, *numbers)
