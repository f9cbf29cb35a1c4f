"""The rows of a class table as the builder reads them."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.specs import Ids, TableSpec

__all__ = ["Numbering", "PulledTable", "TableRows"]


class PulledTable(Protocol):
    """The part of a table that is needed to read it."""

    @property
    def spec(self) -> TableSpec:
        """What the table is."""

    def pull_into_async(self, ids: Ids, out: npt.NDArray[Any]) -> Future[None]:
        """Begin to write the rows of ``ids`` to ``out`` [N, D]."""


class Numbering(Protocol):
    """Some of the ids of a table, numbered from 0 in rising order."""

    @property
    def num_living(self) -> int:
        """How many."""

    def ids(self, numbers: Ids) -> Ids:
        """Ids [N] of these numbers [N]."""


class TableRows:
    """Implements :class:`geartrain.ams.graph.building.rows.RowSource` by pulls: as the rows are at that moment."""

    def __init__(self, table: PulledTable, living: Numbering | None = None) -> None:
        """The rows of all classes, or of the ``living`` ones, which are then numbered as that says.

        Raises InvalidArgument for a hashed table, whose rows cannot be counted through.
        """
        if table.spec.num_rows is None:
            raise InvalidArgument(
                f"table {table.spec.name!r} is hashed; a graph needs a class table, made with num_rows=..."
            )
        self._table = table
        self._living = living
        self.num_rows = table.spec.num_rows if living is None else living.num_living
        self.dim = table.spec.dim

    def read(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Rows ``start`` … ``stop`` - 1, float32 [N, D]: one pull, a request to each shard."""
        return self.read_numbers(np.arange(start, stop, dtype=np.int64))

    def read_numbers(self, numbers: Ids) -> npt.NDArray[np.float32]:
        """Rows of these numbers [N], any order, float32 [N, D]: one pull."""
        rows = np.empty((len(numbers), self.dim), self._table.spec.numpy_dtype)
        ids = numbers if self._living is None else self._living.ids(numbers)
        self._table.pull_into_async(ids, rows).result()
        return rows.astype(np.float32, copy=False)
