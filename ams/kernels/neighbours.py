"""The kernels that build a table of neighbours, typed; formulas stand in ``csrc/neighbours/neighbour_recall.hpp``.

Shapes: M, N rows of two blocks, D width, W candidates a row may have at most, k neighbours. Unit rows are float32
[., D]. Every function releases the GIL and works on up to ``threads`` threads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels import _core

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ids32 = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class RunningBestArrays:
    """The candidates of M rows: at least the ``keep`` best offered to each, unordered, and a floor for the others."""

    scores: Floats
    """[M, W], W = 2 · keep: trimmed to ``keep`` whenever it is full."""
    ids: Ids32
    """[M, W] class ids."""
    counts: Ids32
    """[M] how many there are."""
    floors: Floats
    """[M] no product left out is above it."""
    locks: npt.NDArray[np.uint8]
    """[M] 0 between calls."""
    keep: int

    @classmethod
    def empty(cls, num_rows: int, keep: int) -> RunningBestArrays:
        """Nothing was offered yet."""
        return cls(
            np.zeros((num_rows, 2 * keep), np.float32),
            np.zeros((num_rows, 2 * keep), np.int32),
            np.zeros(num_rows, np.int32),
            np.full(num_rows, -np.inf, np.float32),
            np.zeros(num_rows, np.uint8),
            keep,
        )

    def rows(self, start: int, stop: int) -> RunningBestArrays:
        """A view of some rows."""
        at = slice(start, stop)
        return RunningBestArrays(
            self.scores[at], self.ids[at], self.counts[at], self.floors[at], self.locks[at], self.keep
        )

    def compiled(self) -> _core.RunningBest:
        """The form that the compiled module takes."""
        return _core.RunningBest(
            scores=self.scores,
            ids=self.ids,
            counts=self.counts,
            floors=self.floors,
            locks=self.locks,
            keep=self.keep,
        )


def make_unit_rows(rows: Floats, threads: int) -> int:
    """Divide each row [N, D] by its length, in place; zeros stay. Return the first row that is not finite, or -1."""
    first: int = _core.make_unit_rows(rows, threads=threads)
    return first


def recall_pairs(
    a: Floats,
    first_a: int,
    best_a: RunningBestArrays,
    b: Floats,
    first_b: int,
    best_b: RunningBestArrays | None,
    *,
    threads: int,
) -> None:
    """Offer the products of ``a`` [M, D] and ``b`` [N, D] to the best of both; of a block with itself once."""
    same = first_a == first_b and best_b is not None
    _core.recall_pairs(
        a,
        first_a,
        best_a.compiled(),
        b,
        first_b,
        None if best_b is None else best_b.compiled(),
        same=same,
        threads=threads,
    )


def recall_strays(a: Floats, ids_a: Ids32, best_a: RunningBestArrays, b: Floats, first_b: int, *, threads: int) -> None:
    """As :func:`recall_pairs` for rows ``a`` [M, D] of any classes ``ids_a`` [M]; ``b`` is only looked at."""
    _core.recall_strays(a, ids_a, best_a.compiled(), b, first_b, threads=threads)


def trim_best(best: RunningBestArrays, *, threads: int) -> None:
    """Leave the ``keep`` best of each row."""
    _core.trim_best(best.compiled(), threads=threads)


def exact_scores(
    a: Floats, ids: Ids32, counts: Ids32, b: Floats, first_b: int, scores: Doubles, *, threads: int
) -> None:
    """Write the exact scores [M, W] of each row of ``a`` [M, D] and its candidates [M, W] that lie in ``b``."""
    _core.exact_scores(a, ids, counts, b, first_b, scores, threads=threads)


def exact_best(
    a: Floats,
    ids_a: Ids32,
    b: Floats,
    first_b: int,
    scores: Doubles,
    ids: Ids32,
    counts: Ids32,
    *,
    threads: int,
) -> None:
    """Offer the exact scores of all pairs to the k best of each row of ``a``: ``scores`` and ``ids`` are [M, k]."""
    _core.exact_best(a, ids_a, b, first_b, scores, ids, counts, threads=threads)


def rank_candidates(
    scores: Doubles, ids: Ids32, counts: Ids32, floors: Floats, error_bound: float, k: int, *, threads: int
) -> tuple[Ids32, npt.NDArray[np.bool_]]:
    """Return the k best [M, k] by (score falling, id rising) and whether they are certain [M]."""
    out, accepted = np.empty((len(scores), k), np.int32), np.empty(len(scores), np.uint8)
    _core.rank_candidates(scores, ids, counts, floors, error_bound, out, accepted, threads=threads)
    return out, accepted.astype(np.bool_)
