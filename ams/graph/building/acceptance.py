"""Exact neighbours from candidates: exact scores, the acceptance test, and recomputation of rejected rows.

A row is accepted if its k-th exact score is above the floor of its recall plus the error bound: every class that the
recall left out then has a lower exact score. Otherwise its recall is repeated in float32, whose bound is small; if that
does not decide (near ties, copies of one row), its exact scores with every row are computed: 2 · C · D operations for
all copies.

Legend: M rows of a part, C classes, D width, W candidates a row may have, k neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from geartrain.ams.graph.building.recall import Candidates, CoreProducts
from geartrain.ams.graph.building.rows import Blocks, Floats
from geartrain.ams.kernels import neighbours as ops

_STRIP_ROWS = 8192
_EXACT_ROWS = 256
_SLACK = 1e-9
"""Margin added to the recall's bound, for the rounding of the exact scores: at most D · 2^-53 each."""

Lists = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]


class ExactScores(Protocol):
    """Exact scores of unit rows [M, D] with candidates [M, W], bit-identical to ``ops.exact_scores``."""

    def add(self, others: Floats, first: int) -> None:
        """Add unit rows of classes ``first`` …, among which candidates may be."""

    def result(self) -> npt.NDArray[np.float64]:
        """Return the scores [M, W], once every class was added."""


class _ScoresOfCores:
    def __init__(self, rows: Floats, found: Candidates, num_threads: int) -> None:
        self._rows, self._found, self._threads = rows, found, num_threads
        self._scores = np.zeros(found.ids.shape, np.float64)

    def add(self, others: Floats, first: int) -> None:
        ids, counts, _ = self._found
        ops.exact_scores(self._rows, ids, counts, others, first, self._scores, threads=self._threads)

    def result(self) -> npt.NDArray[np.float64]:
        return self._scores


class Refiner:
    """Neighbour lists of a part of the rows."""

    def __init__(
        self,
        blocks: Blocks,
        k: int,
        *,
        num_threads: int,
        check: Callable[[], None],
        begin_scores: Callable[[Floats, Candidates], ExactScores] | None = None,
    ) -> None:
        """``check`` is called from time to time and may raise to end the work. 1 <= k < C. ``begin_scores`` returns the
        engine of exact scores; None: the cores."""
        self._blocks, self._k, self._threads, self._check = blocks, k, num_threads, check
        self._begin_scores = begin_scores or (lambda rows, found: _ScoresOfCores(rows, found, num_threads))

    def finish(self, rows: Floats, first: int, found: Candidates, error_bound: float, lists: Lists) -> None:
        """Write the neighbours of unit rows [M, D] of classes ``first`` … to ``lists`` [M, k]."""
        rejected = self._rank(rows, found, error_bound, lists)
        zero = _are_zero(rows, rejected)
        for place in rejected[zero].tolist():
            lists[place] = _first_others(first + place, self._k)
        rejected = rejected[~zero]
        core = CoreProducts(self._threads)
        if error_bound > core.error_bound(self._blocks.dim):
            rejected = self._redo_in_float32(rows, first, rejected, core, lists)
        if len(rejected):
            self._redo_exactly(rows, first, rejected, lists)

    def _rank(self, rows: Floats, found: Candidates, error_bound: float, lists: Lists) -> Places:
        """Write the best candidates; return the places [.] of uncertain rows."""
        certain = np.empty(len(rows), np.bool_)
        # Rows outside memory are reread once for all strips; rows in memory are cheap to visit strip by strip.
        strip = _STRIP_ROWS if self._blocks.held else len(rows)
        for start in range(0, len(rows), max(strip, 1)):
            at = slice(start, start + strip)
            self._check()
            some = Candidates(found.ids[at], found.counts[at], found.floors[at])
            exact = self._begin_scores(rows[at], some)
            for first, others in self._others():
                exact.add(others, first)
            lists[at], certain[at] = ops.rank_candidates(
                exact.result(), *some, error_bound + _SLACK, self._k, threads=self._threads
            )
        return np.flatnonzero(~certain)

    def _others(self) -> Iterator[tuple[int, Floats]]:
        """Yield (first class, unit rows) of blocks that cover all classes."""
        if self._blocks.held:
            yield 0, self._blocks.read(0, self._blocks.num_rows)
        else:
            yield from self._blocks_of_others()

    def _blocks_of_others(self) -> Iterator[tuple[int, Floats]]:
        """Yield small blocks as :meth:`_others`: for long work that must be cancellable."""
        for start, stop in self._blocks.ranges():
            self._check()
            yield start, self._blocks.read(start, stop)

    def _redo_in_float32(self, rows: Floats, first: int, places: Places, core: CoreProducts, lists: Lists) -> Places:
        """Recall rows again with the engine of the small bound; return the places that stay uncertain."""
        keep = min(core.num_candidates(self._k), self._blocks.num_rows)
        uncertain = [np.empty(0, np.int64)]
        for start in range(0, len(places), _STRIP_ROWS):
            some = places[start : start + _STRIP_ROWS]
            strays, ids = rows[some], (first + some).astype(np.int32)
            best = ops.RunningBestArrays.empty(len(some), keep)
            for first_other, others in self._blocks_of_others():
                ops.recall_strays(strays, ids, best, others, first_other, threads=self._threads)
            ops.trim_best(best, threads=self._threads)
            redone = np.empty((len(some), self._k), np.int32)
            found = Candidates(best.ids, best.counts, best.floors)
            uncertain.append(some[self._rank(strays, found, core.error_bound(self._blocks.dim), redone)])
            lists[some] = redone
        return np.concatenate(uncertain)

    def _redo_exactly(self, rows: Floats, first: int, places: Places, lists: Lists) -> None:
        """Compute the exact scores of rows with all others; copies of one row, which tie everywhere, share theirs."""
        kinds, kind_of = _kinds(rows, places)
        by_kind = places[np.argsort(kind_of, kind="stable")]
        ends = np.cumsum(np.bincount(kind_of, minlength=len(kinds)))
        for start in range(0, len(kinds), _EXACT_ROWS):
            best = self._best_of_all(rows[kinds[start : start + _EXACT_ROWS]])
            for i, ids in enumerate(best, start):
                for at in range(ends[i - 1] if i else 0, ends[i], _STRIP_ROWS):
                    some = by_kind[at : min(at + _STRIP_ROWS, ends[i])]
                    lists[some] = _without(ids, first + some)

    def _best_of_all(self, rows: Floats) -> Lists:
        """Return the k + 1 classes [M, k + 1] of best exact scores with rows [M, D], themselves included."""
        nobody, counts = np.full(len(rows), -1, np.int32), np.zeros(len(rows), np.int32)
        ids, scores = np.zeros((len(rows), self._k + 1), np.int32), np.zeros((len(rows), self._k + 1), np.float64)
        for first_other, others in self._blocks_of_others():
            ops.exact_best(rows, nobody, others, first_other, scores, ids, counts, threads=self._threads)
        floors = np.full(len(rows), -np.inf, np.float32)
        return ops.rank_candidates(scores, ids, counts, floors, 0.0, self._k + 1, threads=self._threads)[0]


def _are_zero(rows: Floats, places: Places) -> npt.NDArray[np.bool_]:
    zero = np.empty(len(places), np.bool_)
    for start in range(0, len(places), _EXACT_ROWS):
        at = slice(start, start + _EXACT_ROWS)
        zero[at] = ~rows[places[at]].any(axis=1)
    return zero


def _kinds(rows: Floats, places: Places) -> tuple[Places, Places]:
    """Return the places of rows with distinct bits, and for each of ``places`` the index of the one it equals."""
    seen: dict[bytes, int] = {}
    kinds: list[int] = []
    kind_of = np.empty(len(places), np.int64)
    for i, place in enumerate(places.tolist()):
        kind = seen.setdefault(xxhash.xxh3_128_digest(rows[place].data), len(kinds))
        if kind == len(kinds) or rows[kinds[kind]].tobytes() != rows[place].tobytes():
            kind = len(kinds)
            kinds.append(place)
        kind_of[i] = kind
    return np.array(kinds, np.int64), kind_of


def _without(ids: npt.NDArray[np.int32], class_ids: Places) -> Lists:
    """Return for each class [M] the first k of ``ids`` [k + 1] that are not itself: [M, k]."""
    kept = ids != class_ids[:, None]
    kept[kept.all(axis=1), -1] = False
    others: Lists = np.broadcast_to(ids, kept.shape)[kept].reshape(len(class_ids), -1)
    return others


def _first_others(class_id: int, k: int) -> npt.NDArray[np.int32]:
    """Return the k lowest other ids: the neighbours of a row of zeros, whose cosine with every class is 0."""
    ids: npt.NDArray[np.int32] = np.arange(k + 1, dtype=np.int32)
    others: npt.NDArray[np.int32] = ids[ids != class_id][:k]
    return others
