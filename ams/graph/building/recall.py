"""Recall: the best candidates of every row by fast products with an error bound.

A product engine is pluggable: :class:`CoreProducts` works in float32 on all cores; bridge has one for torch devices.

Legend: M, N rows of two blocks, D width, K candidates kept for a row.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from geartrain.ams.graph.building.rows import Floats
from geartrain.ams.kernels import neighbours as ops
from geartrain.ams.values.errors import InvalidArgument


class Candidates(NamedTuple):
    """Candidates found for rows [M]."""

    ids: npt.NDArray[np.int32]
    """[M, width] class ids, unordered."""
    counts: npt.NDArray[np.int32]
    """[M] number of valid ids."""
    floors: Floats
    """[M]: upper bound of the products of the classes left out; -infinity if none was left out."""


class Recall(Protocol):
    """Running best of classes ``first`` … ``first + num_rows - 1``. Blocks come from the same engine's ``load``."""

    def compare_inside(self, a: Any, b: Any) -> None:
        """Offer the products of rows of ``a`` and of ``b`` to both; both lie in the range; ``a is b`` is allowed."""

    def compare_outside(self, a: Any, b: Any) -> None:
        """Offer the products to the rows of ``a`` alone, which lies in the range."""

    def candidates(self) -> Candidates:
        """Return at least the ``keep`` best of each row by product, as far as there are so many."""

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Return the whole state for saving, possibly as views."""

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Continue from the state of :meth:`arrays`."""


class BlockProducts(Protocol):
    """Engine for products of blocks of unit rows."""

    name: str
    """Name of the engine and its precision: saved parts of another one are ignored."""

    def error_bound(self, dim: int) -> float:
        """Return the largest error of a product of two unit rows of this width."""

    def num_candidates(self, k: int) -> int:
        """Return the number of candidates (k' > k) to recall, so that few rows have to be recomputed."""

    def row_bytes(self, keep: int) -> int:
        """Return the host memory of a row's running best, in bytes."""

    def load(self, rows: Floats, first: int) -> Any:
        """Load unit rows [N, D] of classes ``first`` … to where products are computed."""

    def start(self, first: int, num_rows: int, keep: int) -> Recall:
        """Return an empty running best."""


def available_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0))


class _Block(NamedTuple):
    rows: Floats
    first: int


class CoreProducts:
    """Engine for float32 products by compiled kernels: 2 · M · N · D operations a pair of blocks, scores not stored."""

    name = "core float32"

    def __init__(self, num_threads: int | None = None) -> None:
        """``num_threads`` None: all cores. Raises InvalidArgument."""
        if num_threads is not None and num_threads < 1:
            raise InvalidArgument(f"num_threads is {num_threads}; it must be at least 1")
        self.num_threads = num_threads or available_cores()

    def error_bound(self, dim: int) -> float:
        """Return the forward error of an inner product in any order: D·u / (1 - D·u), u = 2^-24.

        Higham, "Accuracy and Stability of Numerical Algorithms", 3.5; times both lengths, which rounding lets exceed 1
        by u·√D at most; plus the loss of flushing numbers below 2^-126.
        """
        product = (dim + 1) * 2.0**-24
        if product >= 1:
            return math.inf  # nothing is certain; every row is recomputed exactly
        length = 1 + 2.0**-23 * math.sqrt(dim)
        return product / (1 - product) * length**2 + dim * 2.0**-120

    def num_candidates(self, k: int) -> int:
        """Return a few more than k: float32 misorders only near ties."""
        return k + 8 + k // 32

    def row_bytes(self, keep: int) -> int:
        """Return 8 bytes a candidate, for twice ``num_candidates`` of them, and 9 more."""
        return 2 * 8 * keep + 9

    def load(self, rows: Floats, first: int) -> _Block:
        """Return the rows where they are."""
        return _Block(rows, first)

    def start(self, first: int, num_rows: int, keep: int) -> _CoreRecall:
        return _CoreRecall(first, num_rows, keep, self.num_threads)


class _CoreRecall:
    def __init__(self, first: int, num_rows: int, keep: int, num_threads: int) -> None:
        self._first, self._num_threads = first, num_threads
        self._best = ops.RunningBestArrays.empty(num_rows, keep)

    def compare_inside(self, a: _Block, b: _Block) -> None:
        ops.recall_pairs(a.rows, a.first, self._slice(a), b.rows, b.first, self._slice(b), threads=self._num_threads)

    def compare_outside(self, a: _Block, b: _Block) -> None:
        ops.recall_pairs(a.rows, a.first, self._slice(a), b.rows, b.first, None, threads=self._num_threads)

    def candidates(self) -> Candidates:
        ops.trim_best(self._best, threads=self._num_threads)
        return Candidates(self._best.ids, self._best.counts, self._best.floors)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        best = self._best
        return {"scores": best.scores, "ids": best.ids, "counts": best.counts, "floors": best.floors}

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        for name, array in self.arrays().items():
            array[...] = arrays[name]

    def _slice(self, block: _Block) -> ops.RunningBestArrays:
        start = block.first - self._first
        return self._best.rows(start, start + len(block.rows))
