"""Input rows of a table of neighbours, as blocks of unit rows: held in memory, or read again and again.

Legend: C rows, D width.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from geartrain.ams.kernels import neighbours as ops
from geartrain.ams.values.errors import InvalidArgument, InvalidRows, NonFinite
from geartrain.ams.values.specs import Ids, TableSpec

Floats = npt.NDArray[np.float32]
_log = logging.getLogger(__name__)


class RowSource(Protocol):
    """Rows of classes 0 … num_rows - 1, readable in any order, more than once.

    If rows change between two reads, a table that reads them again mixes rows of several times.
    """

    @property
    def num_rows(self) -> int:
        """Number C of rows."""

    @property
    def dim(self) -> int:
        """Width D of a row."""

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return rows ``start`` … ``stop`` - 1 as floats [stop - start, D] of any length, read-only."""


class ArrayRows:
    """Row source over an array [C, D]."""

    def __init__(self, rows: npt.NDArray[Any]) -> None:
        """Raise InvalidRows unless ``rows`` is two-dimensional."""
        if rows.ndim != 2:
            raise InvalidRows(f"rows have shape {rows.shape}; they must be [C, D]")
        self._rows = rows

    @property
    def num_rows(self) -> int:
        return int(self._rows.shape[0])

    @property
    def dim(self) -> int:
        return int(self._rows.shape[1])

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        return self._rows[start:stop]


class PulledTable(Protocol):
    """Interface of a table for reading."""

    @property
    def spec(self) -> TableSpec:
        """Spec of the table."""

    def pull_into_async(self, ids: Ids, out: npt.NDArray[Any]) -> Future[None]:
        """Start to write the rows of ``ids`` to ``out`` [N, D]."""


class Numbering(Protocol):
    """Subset of a table's ids, numbered from 0 in ascending order."""

    @property
    def num_live_classes(self) -> int:
        """Number of these ids."""

    def ids(self, numbers: Ids) -> Ids:
        """Return the ids [N] of these numbers [N]."""


class TableRows:
    """Row source that pulls current rows of a table."""

    def __init__(self, table: PulledTable, live: Numbering | None = None) -> None:
        """Use the rows of all classes, or of the ``live`` ones by their numbers.

        Raises InvalidArgument for a hashed table, whose rows cannot be enumerated.
        """
        if table.spec.num_rows is None:
            raise InvalidArgument(
                f"table {table.spec.name!r} is hashed; a graph needs a class table, made with num_rows=..."
            )
        self._table = table
        self._live = live
        self.num_rows = table.spec.num_rows if live is None else live.num_live_classes
        self.dim = table.spec.dim

    def read(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Return rows ``start`` … ``stop`` - 1, float32 [N, D]: one pull, a request to each shard."""
        return self.read_numbers(np.arange(start, stop, dtype=np.int64))

    def read_numbers(self, numbers: Ids) -> npt.NDArray[np.float32]:
        """Return the rows of these numbers [N], any order, float32 [N, D]: one pull."""
        rows = np.empty((len(numbers), self.dim), self._table.spec.numpy_dtype)
        ids = numbers if self._live is None else self._live.ids(numbers)
        self._table.pull_into_async(ids, rows).result()
        return rows.astype(np.float32, copy=False)


class Blocks(Protocol):
    """Unit rows of all classes, block by block."""

    num_rows: int
    """Number C of rows."""
    dim: int
    """Width D of a row."""

    @property
    def held(self) -> bool:
        """Whether all rows are in memory: then any may be read at any time."""

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of blocks that cover all classes, in any order; unless the rows are held, each must be
        read before the next is requested."""

    def read(self, start: int, stop: int) -> Floats:
        """Return unit rows ``start`` … ``stop`` - 1 [., D], read-only."""


class UnitBlocks:
    """Blocks of unit rows of a source; a row of zeros stays zero."""

    def __init__(self, source: RowSource, *, block_rows: int, num_threads: int, held: bool) -> None:
        """Read every row once; ``held`` keeps them: 4 · C · D bytes. Raises NonFinite (names a class), InvalidRows."""
        self._source = source
        self._num_threads = num_threads
        self.num_rows, self.dim, self.block_rows = source.num_rows, source.dim, block_rows
        self._held: Floats | None = np.empty((self.num_rows, self.dim), np.float32) if held else None
        self.changed = False
        """Whether a block differed when it was read again: then the neighbours mix rows of several times."""
        self._digests: list[bytes] = []
        seen = xxhash.xxh3_128()
        for start, stop in self.ranges():
            rows = self._read(start, stop)
            seen.update(rows.data)
            self._digests.append(xxhash.xxh3_64_digest(rows.data))
            if self._held is not None:
                self._held[start:stop] = rows
        self.fingerprint: str = seen.hexdigest()
        """XXH3 of all unit rows: two sources with the same one have the same neighbours."""

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of every block, ascending."""
        for start in range(0, self.num_rows, self.block_rows):
            yield start, min(start + self.block_rows, self.num_rows)

    @property
    def held(self) -> bool:
        """Whether the rows are in memory."""
        return self._held is not None

    def read(self, start: int, stop: int) -> Floats:
        """Return unit rows ``start`` … ``stop`` - 1, read-only: a view of held ones, or read from the source block by
        block. ``start`` begins a block and ``stop`` ends one."""
        if self._held is not None:
            return self._held[start:stop]
        if stop - start <= self.block_rows:
            return self._read_again(start, stop)
        rows = np.empty((stop - start, self.dim), np.float32)
        for at in range(start, stop, self.block_rows):
            end = min(at + self.block_rows, stop)
            rows[at - start : end - start] = self._read_again(at, end)
        return rows

    def _read_again(self, start: int, stop: int) -> Floats:
        rows = self._read(start, stop)
        if not self.changed and xxhash.xxh3_64_digest(rows.data) != self._digests[start // self.block_rows]:
            self.changed = True
            _log.warning("rows %d to %d changed while a graph was built; it is of rows of several times", start, stop)
        return rows

    def _read(self, start: int, stop: int) -> Floats:
        rows = np.array(self._source.read(start, stop), dtype=np.float32, order="C")
        if rows.shape != (stop - start, self.dim):
            raise InvalidRows(f"rows {start} to {stop} came as {rows.shape}; they must be {(stop - start, self.dim)}")
        if (bad := ops.make_unit_rows(rows, self._num_threads)) >= 0:
            raise NonFinite(
                f"the row of class {start + bad} holds NaN or infinity; a graph needs finite rows. Restore or assign it"
            )
        return rows


def check_size(source: RowSource) -> None:
    """Raise InvalidArgument unless the source has at least one row and column, and at most 2**31 rows."""
    if not 1 <= source.num_rows <= 2**31:
        raise InvalidArgument(f"the source has {source.num_rows} rows; an exact graph is built of 1 to 2**31 rows")
    if source.dim < 1:
        raise InvalidArgument(f"the rows have dim {source.dim}; it must be at least 1")
