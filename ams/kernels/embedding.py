"""Lookup of a batch in embedding tables: ids merged by table, rows pooled, gradients summed.

Three calls of compiled code for all features of a model, each of which releases the GIL once. Shapes: N ids of a
feature, V vectors that it gets (for each bag of ids, or for each id), U distinct ids of a table, D its width.
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
"""Poolings by the numbers of the compiled module. With weights w: Σ w·x, Σ w·x / Σ w, Σ w·x / √Σ w², largest x."""
Floats = npt.NDArray[np.float32]
Bags = Ids | int
"""Starts of the bags among the ids, and the end [bags + 1]; or the number of ids of each."""


class FeatureIds(NamedTuple):
    """Ids of one feature in a batch."""

    table: int
    """Number of the table."""
    ids: Ids
    """[N] int64, C-contiguous."""
    bags: Bags
    weights: Floats | None
    """[N] float32; None: 1 each."""
    pooling: PoolingName | None
    padding_id: int | None
    """Id that is ignored: no row, no part of a mean, a zero vector where ids are not pooled."""

    @property
    def num_vectors(self) -> int:
        """Number V of vectors: one for each bag, or for each id that is not pooled."""
        if self.pooling is None:
            return len(self.ids)
        return len(self.ids) // self.bags if isinstance(self.bags, int) else len(self.bags) - 1


class Lookup:
    """Lookup of one batch. The arrays given must not change while it exists."""

    def __init__(self, features: Sequence[FeatureIds], num_rows: Sequence[int | None], threads: int) -> None:
        """Merge the ids of tables with so many rows each (None: any id >= 0).

        Raises BadId, whose args are the feature and the index of an id that is out of range, and ValueError for arrays
        that contradict each other.
        """
        self._lookup = _core.Lookup(list(features), list(num_rows), threads)
        self.ids: list[Ids] = self._lookup.distinct_ids()
        """Distinct ids [U] of each table, in order of first appearance. Read-only, in the memory of the lookup."""

    def places_of(self, feature: int) -> npt.NDArray[np.int32]:
        """Return the index of each id [N] among the distinct ones; -1: padding."""
        return self._lookup.places_of(feature)

    def places_among(self, table: int, ids: Ids) -> npt.NDArray[np.int32]:
        """Return the indices, among the distinct ids of a table, of those ``ids`` [K] that are there."""
        places = np.empty(len(ids), np.int32)
        return places[: self._lookup.places_among(table, ids, places)]

    def occurrences(self, table: int, features: Sequence[bool]) -> npt.NDArray[np.uint32]:
        """Return the occurrences of each distinct id [U] of a table in the features marked, without padding."""
        out = np.empty(len(self.ids[table]), np.uint32)
        self._lookup.count_occurrences(table, list(features), out)
        return out

    def pool(self, rows: Sequence[npt.NDArray[Any]], *, keep_maxima: bool) -> list[Floats]:
        """Return the vectors [V, D] of each feature, from the rows [U, D] of each table, C-contiguous.

        ``keep_maxima``: record the rows of the largest values for :meth:`sum_gradients`.
        """
        bits = [(own if own.dtype == np.float32 else own.view(np.uint16), ops.DTYPE_CODES[own.dtype]) for own in rows]
        return self._lookup.pool(bits, keep_maxima)

    def sum_gradients(self, vectors: list[Floats | None], dims: list[int]) -> tuple[float, list[Floats]]:
        """Sum the gradients [U, D] of the rows of each table of width ``dims`` from those of the vectors [V, D] (None:
        zero), which may be columns of a wider array.

        Returns Σ g² over all, in float64, and the gradients; the sum is finite only if every one is. The same bits for
        any number of threads.
        """
        return self._lookup.sum_gradients(vectors, dims)


class MappedRows:
    """Rows of several tables in memory of others, such as mapped files, found by a hash of their id.

    Thread-safe. A request to all tables is one call, which releases the GIL once.
    """

    def __init__(self, tables: Sequence[tuple[Ids, Ids, npt.NDArray[Any]]]) -> None:
        """Each table has ``starts`` [2^bits + 1], the starts among its ``ids`` [N] of those whose ``splitmix64`` has
        the same first bits, the ids, and their ``rows`` [N, D]. They are held, not copied. Raises ValueError for arrays
        that contradict each other.
        """
        self._tables = _core.MappedRows([(starts, ids, ops.as_bits(rows)[0]) for starts, ids, rows in tables])

    def pull(
        self, tables: Sequence[int], ids: Sequence[Ids], *, out: Sequence[npt.NDArray[Any]]
    ) -> dict[int, npt.NDArray[np.int64]]:
        """Write the rows of ``ids`` [N] of each of ``tables``, given by number, to its ``out`` [N, D].

        ``out`` may be columns of a wider array. Returns, by index in ``tables``, the ascending indices of ids without a
        row, where there are any; ``out`` stays unchanged there.
        """
        missing, counts = np.empty(sum(map(len, ids)), np.int64), np.empty(len(tables), np.int64)
        bits = [rows if rows.dtype == np.float32 else rows.view(np.uint16) for rows in out]
        self._tables.pull(list(tables), list(ids), bits, missing, counts)
        ends = np.cumsum(counts)
        return {at: missing[ends[at] - counts[at] : ends[at]] for at in np.flatnonzero(counts).tolist()}
