"""What a model looks up in embedding tables for one batch: ids merged by table, rows pooled, gradients summed.

Three calls of compiled code for all features of a model, each of which gives up the interpreter lock once. Shapes: N
ids of a feature, V vectors that it gets (for each bag of ids, or for each id), U distinct ids of a table, D its width.
``tests/specification/embedding.py`` is the specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels import _core, ops
from geartrain.ams.kernels._core import BadId as BadId
from geartrain.ams.values.specs import Ids

PoolingName = Literal["sum", "mean", "sqrtn", "max"]
POOLINGS: tuple[PoolingName | None, ...] = (None, "sum", "mean", "sqrtn", "max")
"""As the compiled module numbers them. With weights w: Σ w·x, Σ w·x / Σ w, Σ w·x / √Σ w², and the largest x."""
Floats = npt.NDArray[np.float32]
Bags = Ids | int
"""Where bags begin among the ids, and the end [bags + 1]; or how many ids each has."""


class FeatureIds(NamedTuple):
    """The ids of one feature in a batch."""

    table: int
    """Which of the tables."""
    ids: Ids
    """[N] int64, C-contiguous."""
    bags: Bags
    weights: Floats | None
    """[N] float32; None: 1 each."""
    pooling: PoolingName | None
    padding_id: int | None
    """Passed over: no row, no part of a mean, a zero vector where ids are not pooled."""

    @property
    def num_vectors(self) -> int:
        """V: one for each bag, or for each id that is not pooled."""
        if self.pooling is None:
            return len(self.ids)
        return len(self.ids) // self.bags if isinstance(self.bags, int) else len(self.bags) - 1


class Lookup:
    """The lookup of one batch. The arrays given must stay as they are while it lives."""

    def __init__(self, features: Sequence[FeatureIds], num_rows: Sequence[int | None], threads: int) -> None:
        """Merge the ids of tables with so many rows each (None: any id >= 0).

        Raises BadId, whose args are the feature and the place of an id that is out of range, and ValueError for arrays
        that contradict each other.
        """
        self._lookup = _core.Lookup(list(features), list(num_rows), threads)
        self.ids: list[Ids] = self._lookup.distinct_ids()
        """The distinct ids [U] of each table, in order of first appearance. Read-only, in the memory of the lookup."""

    def places_of(self, feature: int) -> npt.NDArray[np.int32]:
        """The place of each id [N] among the distinct ones; -1: padding."""
        return self._lookup.places_of(feature)

    def places_among(self, table: int, ids: Ids) -> npt.NDArray[np.int32]:
        """The places, among the distinct ids of a table, of those of ``ids`` [K] that are there. A look each."""
        places = np.empty(len(ids), np.int32)
        return places[: self._lookup.places_among(table, ids, places)]

    def occurrences(self, table: int, features: Sequence[bool]) -> npt.NDArray[np.uint32]:
        """How often each distinct id [U] of a table is in those of its features that are marked, padding left out."""
        out = np.empty(len(self.ids[table]), np.uint32)
        self._lookup.count_occurrences(table, list(features), out)
        return out

    def pool(self, rows: Sequence[npt.NDArray[Any]], *, keep_maxima: bool) -> list[Floats]:
        """The vectors [V, D] of each feature, from the rows [U, D] of each table, C-contiguous.

        ``keep_maxima``: :meth:`sum_gradients` will ask whose values were the largest.
        """
        bits = [(own if own.dtype == np.float32 else own.view(np.uint16), ops.DTYPE_CODES[own.dtype]) for own in rows]
        return self._lookup.pool(bits, keep_maxima)

    def sum_gradients(self, vectors: list[Floats | None], dims: list[int]) -> tuple[float, list[Floats]]:
        """The gradients [U, D] of the rows of each table, which are so wide, from those of the vectors [V, D] (None:
        zero), which may be columns of a wider array.

        Returns Σ g² over all, in float64, before them: finite only if every one is. The same bits for any number of
        threads.
        """
        return self._lookup.sum_gradients(vectors, dims)


class MappedRows:
    """Rows of several tables in memory that others wrote, such as mapped files: found by the hash of their id.

    Thread-safe. All that a request asks of all tables is one call, which gives up the interpreter lock once.
    """

    def __init__(self, tables: Sequence[tuple[Ids, Ids, npt.NDArray[Any]]]) -> None:
        """Each has ``starts`` [2^bits + 1], where among its ``ids`` [N] those begin whose ``splitmix64`` has the same
        first bits, those, and their ``rows`` [N, D]. They are held, not copied. Raises ValueError for arrays that
        contradict each other.
        """
        self._tables = _core.MappedRows([(starts, ids, ops.as_bits(rows)[0]) for starts, ids, rows in tables])

    def pull(
        self, tables: Sequence[int], ids: Sequence[Ids], *, out: Sequence[npt.NDArray[Any]]
    ) -> dict[int, npt.NDArray[np.int64]]:
        """Of each of ``tables``, by its number, write the row of each of its ``ids`` [N] to its ``out`` [N, D],
        which may be columns of a wider array.

        Returns by place in ``tables`` the places of ids that have no row, rising, where there are any; ``out`` stays as
        it was there.
        """
        missing, counts = np.empty(sum(map(len, ids)), np.int64), np.empty(len(tables), np.int64)
        bits = [rows if rows.dtype == np.float32 else rows.view(np.uint16) for rows in out]
        self._tables.pull(list(tables), list(ids), bits, missing, counts)
        ends = np.cumsum(counts)
        return {at: missing[ends[at] - counts[at] : ends[at]] for at in np.flatnonzero(counts).tolist()}
