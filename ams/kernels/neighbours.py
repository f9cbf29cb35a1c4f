"""Kernels that find nearest rows, typed; formulas are in ``csrc/neighbours/neighbour_recall.hpp``.

Shapes: M, N rows of two blocks, D width, W candidates a row may have at most, k neighbours. Unit rows are float32 [.,
D]. Every function releases the GIL and uses up to ``threads`` threads.

make_unit_rows  divides each row [N, D] by its length, in place, zeros stay; returns the first that is not finite, or -1
recall_pairs    offers the products of a [M, D] and b [N, D] to the best of both, of a block with itself once
recall_strays   as recall_pairs for rows a [M, D] of any classes ids_a [M]; the best of b do not change
trim_best       leaves the ``keep`` best of each row
exact_scores    writes the exact scores [M, W] of each row of a [M, D] and its candidates [M, W] that lie in b
exact_best      offers the exact scores of all pairs to the k best of each row of a: scores and ids are [M, k]
encode_rows     writes finite rows [C, D] with a byte a column to panels [C / 16, panel_bytes(D)], see ``row_codes.hpp``
search_rows     writes scores [N, k] and rows [N, k] of the best rows for features [N, D], see ``row_search.hpp``
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels import _core
from geartrain.ams.kernels._core import encode_rows as encode_rows
from geartrain.ams.kernels._core import exact_best as exact_best
from geartrain.ams.kernels._core import exact_scores as exact_scores
from geartrain.ams.kernels._core import make_unit_rows as make_unit_rows
from geartrain.ams.kernels._core import panel_bytes as panel_bytes
from geartrain.ams.kernels._core import recall_pairs as recall_pairs
from geartrain.ams.kernels._core import recall_strays as recall_strays
from geartrain.ams.kernels._core import search_rows as search_rows
from geartrain.ams.kernels._core import trim_best as trim_best

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Ids32 = npt.NDArray[np.int32]

PANEL_ROWS = 16
"""Number of rows of a panel."""


@dataclass(frozen=True, eq=False)
class RunningBestArrays:
    """Candidates of M rows: at least the ``keep`` best offered to each, unordered, and a floor for the others."""

    scores: Floats
    """[M, W], W = 2 · keep: trimmed to ``keep`` whenever it is full."""
    ids: Ids32
    """[M, W] class ids."""
    counts: Ids32
    """[M] number of candidates."""
    floors: Floats
    """[M] upper bound of the products left out."""
    locks: npt.NDArray[np.uint8]
    """[M] 0 between calls."""
    keep: int

    @classmethod
    def empty(cls, num_rows: int, keep: int) -> RunningBestArrays:
        """Return arrays to which nothing was offered yet."""
        return cls(
            np.zeros((num_rows, 2 * keep), np.float32),
            np.zeros((num_rows, 2 * keep), np.int32),
            np.zeros(num_rows, np.int32),
            np.full(num_rows, -np.inf, np.float32),
            np.zeros(num_rows, np.uint8),
            keep,
        )

    def rows(self, start: int, stop: int) -> RunningBestArrays:
        """Return a view of the rows ``start`` … ``stop`` - 1."""
        at = slice(start, stop)
        return RunningBestArrays(
            self.scores[at], self.ids[at], self.counts[at], self.floors[at], self.locks[at], self.keep
        )


def rank_candidates(
    scores: Doubles, ids: Ids32, counts: Ids32, floors: Floats, error_bound: float, k: int, *, threads: int
) -> tuple[Ids32, npt.NDArray[np.bool_]]:
    """Return the k best [M, k] by (score descending, id ascending) and whether they are certain [M]."""
    out, accepted = np.empty((len(scores), k), np.int32), np.empty(len(scores), np.uint8)
    _core.rank_candidates(scores, ids, counts, floors, error_bound, out, accepted, threads=threads)
    return out, accepted.astype(np.bool_)


def pack_panels(rows: Floats, *, threads: int) -> npt.NDArray[np.uint8] | None:
    """Return the panels of rows [S, D]; None: a row is not finite, and cannot be searched."""
    panels = np.empty((-(-len(rows) // PANEL_ROWS), panel_bytes(rows.shape[1])), np.uint8)
    encode_rows(rows, panels, threads=threads)
    lengths = panels[:, -4 * PANEL_ROWS :].view(np.float32)
    return panels if np.isfinite(lengths).all() else None


def best_classes(
    rows: Floats,
    panels: npt.NDArray[np.uint8],
    features: Floats,
    k: int,
    *,
    centers: int = 1,
    biases: Floats | None = None,
    largest_bias: float = 0.0,
    threads: int,
) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Return exact scores [N, k'], descending, and numbers [N, k'] of the best classes for finite features [N, D].

    Of equal scores the lower number is first; k' = min(k, classes). A class has ``centers`` of the rows, one after the
    other, and the score of the best of them, to which its bias [classes] is added.
    """
    k = min(k, len(rows) // centers)
    shape = len(features), k * centers
    scores, found = np.empty(shape, np.float32), np.empty(shape, np.int64)
    offsets = np.repeat(biases, centers) if biases is not None and centers > 1 else biases
    search_rows(rows, panels, offsets, largest_bias, features, scores, found, threads=threads)
    return first_of_each(scores, found, k, centers) if centers > 1 else (scores, found)


def first_of_each(
    scores: Floats, rows: npt.NDArray[np.int64], k: int, centers: int
) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Return the scores and numbers of the k best classes, from sorted scores of rows, up to ``centers`` a class."""
    if centers == 1:
        return scores, rows
    classes = rows // centers
    order = np.argsort(classes, axis=1, kind="stable")
    by_class = np.take_along_axis(classes, order, axis=1)
    is_again = np.zeros(classes.shape, np.bool_)
    np.put_along_axis(is_again, order[:, 1:], by_class[:, 1:] == by_class[:, :-1], axis=1)
    places = np.argsort(is_again, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, places, axis=1), np.take_along_axis(classes, places, axis=1)
