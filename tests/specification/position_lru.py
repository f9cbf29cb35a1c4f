"""The specifications of the index of positions and of freshness, in plain Python and numpy."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt


class ReferencePositionLru:
    """What :class:`geartrain.ams.kernels.position_lru.PositionLru` does; it may take any free position."""

    def __init__(self, capacity: int) -> None:
        self.positions: OrderedDict[int, int] = OrderedDict()
        """From the least to the most recently used."""
        self.free = set(range(capacity))

    def find(self, ids: list[int], *, touch: bool) -> list[int]:
        """The positions, or -1."""
        found = [self.positions.get(row_id, -1) for row_id in ids]
        if touch:
            for row_id in ids:
                if row_id in self.positions:
                    self.positions.move_to_end(row_id)
        return found

    def place(self, ids: list[int]) -> tuple[list[int], int]:
        """The positions, and how many other ids lost theirs."""
        placed, evicted = [], 0
        for row_id in ids:
            if row_id not in self.positions:
                if not self.free:
                    self.free.add(self.positions.popitem(last=False)[1])
                    evicted += 1
                self.positions[row_id] = self.free.pop()
            self.positions.move_to_end(row_id)
            placed.append(self.positions[row_id])
        return placed, evicted

    def remove(self, ids: list[int]) -> list[int]:
        """The positions that became free, or -1."""
        removed = [self.positions.pop(row_id, -1) for row_id in ids]
        self.free |= {position for position in removed if position >= 0}
        return removed

    def oldest(self, count: int) -> list[int]:
        """Ids, the least recently used first."""
        return list(self.positions)[:count]

    def grow(self, capacity: int) -> None:
        """More positions."""
        self.free |= set(range(len(self.positions) + len(self.free), capacity))


def judge(
    versions: npt.NDArray[np.int64],
    times: npt.NDArray[np.float64],
    *,
    now: float,
    dense_version: int,
    expire_seconds: float,
    max_version_lag: int | None,
    age_edges: npt.NDArray[np.float64],
    num_lags: int,
) -> tuple[npt.NDArray[np.bool_], int, int, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return hits [N], how many are absent, how many lag, and the counts of the hits' ages [E + 1] and lags."""
    ages = np.abs(now - times)
    lags = [abs(dense_version - int(version)) for version in versions]
    young = ages < expire_seconds
    near = np.array([max_version_lag is None or lag <= max_version_lag for lag in lags], np.bool_)
    hits = young & near
    age_bins = np.searchsorted(age_edges, ages[hits], side="right")
    lag_bins = np.array([min(lag.bit_length(), num_lags - 1) for lag in lags], np.int64)[hits]
    return (
        hits,
        int((times == -np.inf).sum()),
        int((young & ~near).sum()),
        np.bincount(age_bins, minlength=len(age_edges) + 1),
        np.bincount(lag_bins, minlength=num_lags),
    )
