"""Recall: the best candidates of every row by fast products whose error is bounded.

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
    """What a recall has found for its rows [M]."""

    ids: npt.NDArray[np.int32]
    """[M, width] class ids, unordered."""
    counts: npt.NDArray[np.int32]
    """[M] how many of them are meant."""
    floors: Floats
    """[M]: no class left out has a product above it; -infinity if none was left out."""


class Recall(Protocol):
    """The running best of classes ``first`` … ``first + num_rows - 1``. Blocks come from the same engine's ``load``."""

    def compare_inside(self, a: Any, b: Any) -> None:
        """Offer the products of rows of ``a`` and of ``b`` to both; both lie in the range; ``a is b`` is allowed."""

    def compare_outside(self, a: Any, b: Any) -> None:
        """Offer them to the rows of ``a``, which lies in the range."""

    def candidates(self) -> Candidates:
        """At least the ``keep`` best of each row by product, as far as there are so many."""

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Its whole state, to save it. May be views."""

    def restore(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Go on from what :meth:`arrays` returned."""


class BlockProducts(Protocol):
    """An engine for products of blocks of unit rows."""

    name: str
    """Identifies the engine and its precision: saved parts of another one are not taken up."""

    def error_bound(self, dim: int) -> float:
        """The most that a product of two unit rows of this width can differ from the true one."""

    def keep(self, k: int) -> int:
        """How many candidates (k' > k) to recall, so that few rows have to be redone."""

    def row_bytes(self, keep: int) -> int:
        """Host memory of a row's running best."""

    def load(self, rows: Floats, first: int) -> Any:
        """Bring unit rows [N, D] of classes ``first`` … to where products are made."""

    def begin(self, first: int, num_rows: int, keep: int) -> Recall:
        """An empty running best."""


def available_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


class _Block(NamedTuple):
    rows: Floats
    first: int


class CoreProducts:
    """Products in float32 by the compiled kernels: 2 · M · N · D operations a pair of blocks, no matrix of scores."""

    name = "core float32"

    def __init__(self, num_threads: int | None = None) -> None:
        """``num_threads`` None: all cores. Raises InvalidArgument."""
        if num_threads is not None and num_threads < 1:
            raise InvalidArgument(f"num_threads is {num_threads}; it must be at least 1")
        self.num_threads = num_threads or available_cores()

    def error_bound(self, dim: int) -> float:
        """Forward error of an inner product in any order: D·u / (1 - D·u), u = 2^-24.

        Higham, "Accuracy and Stability of Numerical Algorithms", 3.5; times both lengths, which rounding lets exceed 1
        by u·√D at most; and what flushing numbers below 2^-126 drops.
        """
        product = (dim + 1) * 2.0**-24
        if product >= 1:
            return math.inf  # nothing is certain; every row is redone exactly
        length = 1 + 2.0**-23 * math.sqrt(dim)
        return product / (1 - product) * length**2 + dim * 2.0**-120

    def keep(self, k: int) -> int:
        """A few more than k: float32 orders all but near ties as they are."""
        return k + 8 + k // 32

    def row_bytes(self, keep: int) -> int:
        """8 bytes a candidate, twice ``keep`` of them."""
        return 2 * 8 * keep + 9

    def load(self, rows: Floats, first: int) -> _Block:
        """The rows where they are."""
        return _Block(rows, first)

    def begin(self, first: int, num_rows: int, keep: int) -> _CoreRecall:
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
