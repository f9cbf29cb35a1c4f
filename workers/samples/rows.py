"""Samples in memory: rows of Arrow tables, and their columns as tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from geartrain.ams.values.specs import Ids
from geartrain.bridge.embedding.levels import Nodes
from geartrain.workers.samples.batches import SampleBatch, Values
from geartrain.workers.samples.columns import whole_array


class Rows(Protocol):
    """Rows of a part of a source."""

    num_rows: int

    def slice(self, first: int, count: int) -> SampleRows:
        """Return at most ``count`` rows from ``first`` on. Raises SourceError."""


class ChangedRows:
    """Rows of a part, each slice of which is converted on access."""

    def __init__(self, num_rows: int, change: Callable[[int, int], SampleRows]) -> None:
        """``change`` returns the converted rows from a first one to an end."""
        self.num_rows, self._change = num_rows, change

    def slice(self, first: int, count: int) -> SampleRows:
        return self._change(first, min(self.num_rows, first + count))


class SampleRows:
    """Samples: rows of a table; for trees also the node of each in the tables of outer levels."""

    def __init__(self, table: Any, num_rows: int, outer: Mapping[str, tuple[Any, Ids]] | None = None) -> None:
        """``outer``: for each level but the last its table, and the row [num_rows] of each sample in it; outermost
        first.
        """
        self.table, self.num_rows, self._outer = table, num_rows, outer or {}

    def slice(self, first: int, count: int) -> SampleRows:
        """Return at most ``count`` rows from ``first`` on, without a copy."""
        end = min(self.num_rows, first + count)
        outer = {level: (table, places[first:end]) for level, (table, places) in self._outer.items()}
        return SampleRows(self.table.slice(first, count), end - first, outer)

    def shuffled(self, random: np.random.Generator) -> SampleRows:
        """Return all rows in an order that depends on them and ``random`` alone. Trees are moved as units."""
        roots = next((places for _, places in self._outer.values()), np.arange(self.num_rows))
        starts = np.flatnonzero(np.diff(roots, prepend=-1))
        lengths = np.diff(np.append(starts, len(roots)))
        trees = random.permutation(len(starts))
        starts, lengths = starts[trees], lengths[trees]
        return self.take(np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(len(roots)))

    def take(self, indices: npt.NDArray[np.int64]) -> SampleRows:
        """Return the rows at ``indices``, in that order. Copies them."""
        outer = {level: (table, places[indices]) for level, (table, places) in self._outer.items()}
        return SampleRows(self.table.combine_chunks().take(pa.array(indices)), len(indices), outer)

    def columns(self) -> Iterator[tuple[str, Values, Ids | None]]:
        """Yield name and values of each column; for outer levels also the node of each sample."""
        for table, places in (*self._outer.values(), (self.table, None)):
            for name in table.column_names:
                yield name, tensors_of_column(table.column(name)), places

    def texts(self, name: str) -> list[str]:
        """Return the distinct texts in a column of strings, or of lists of them."""
        tables = (self.table, *(table for table, _ in self._outer.values()))
        array = whole_array(next(table for table in tables if name in table.column_names).column(name))
        values = array.flatten() if pa.types.is_large_list(array.type) else array
        found: list[str] = values.unique().cast(pa.string()).drop_null().to_pylist()
        return found

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return the values of a column of single numbers, for each sample."""
        values, places = next((values, places) for own, values, places in self.columns() if own == name)
        assert isinstance(values, Tensor)
        array = values.numpy()
        return array if places is None else array[places]

    def map_column(self, name: str, change: Callable[[Any], Any]) -> SampleRows:
        """Return the rows with the Arrow column ``name`` replaced by ``change(column)``."""

        def changed(table: Any) -> Any:
            if name not in table.column_names:
                return table
            return table.set_column(table.column_names.index(name), name, change(table.column(name)))

        outer = {level: (changed(table), places) for level, (table, places) in self._outer.items()}
        return SampleRows(changed(self.table), self.num_rows, outer)

    def joined(self, others: Sequence[SampleRows]) -> SampleRows:
        """Return these rows, then those of ``others``. Shared tables are stored once."""
        if not others:
            return self
        parts = [self, *others]
        outer = {level: _joined([part._outer[level] for part in parts]) for level in self._outer}
        table = pa.concat_tables([part.table for part in parts])
        return SampleRows(table, sum(part.num_rows for part in parts), outer)

    def batch(self, cursors: Mapping[int, tuple[int, int]]) -> SampleBatch:
        """Return the rows as tensors."""
        columns = {}
        level_of: dict[str, str] = {}
        nodes: dict[str, Nodes] = {}
        for level, (table, places) in self._outer.items():
            kept, index = np.unique(places, return_inverse=True)
            nodes[level] = Nodes(torch.from_numpy(index.astype(np.int64)), len(kept))
            columns.update(tensors_of(table.take(pa.array(kept))))
            level_of.update(dict.fromkeys(table.column_names, level))
        columns.update(tensors_of(self.table))
        return SampleBatch(columns, self.num_rows, cursors, level_of, nodes)


def _joined(parts: Sequence[tuple[Any, Ids]]) -> tuple[Any, Ids]:
    first: dict[int, int] = {}
    tables: list[Any] = []
    count = 0
    for table, _ in parts:
        if id(table) not in first:
            first[id(table)] = count
            tables.append(table)
            count += table.num_rows
    places = np.concatenate([places + first[id(table)] for table, places in parts])
    return pa.concat_tables(tables) if len(tables) > 1 else tables[0], places


def tensors_of(table: Any) -> dict[str, Values]:
    """Return the columns of an Arrow table as tensors; their types must be samples', without missing values. Copies
    them."""
    return {name: tensors_of_column(table.column(name)) for name in table.column_names}


def column_of_bags(values: Ids, offsets: Ids | None) -> Any:
    """Return an Arrow column of ids, or of lists of them."""
    ids = pa.array(values)
    return ids if offsets is None else pa.LargeListArray.from_arrays(pa.array(offsets), ids)


def ids_of_booleans(column: Any, missing: int) -> Any:
    """Return an Arrow column of booleans, or of lists of them, as 0 and 1."""
    array = whole_array(column)
    if pa.types.is_large_list(array.type):
        return pa.LargeListArray.from_arrays(array.offsets, ids_of_booleans(array.values, missing))
    return array.cast(pa.int64()).fill_null(missing)


def tensors_of_column(column: Any) -> Values:
    """Return one column; strings become numbers that are equal where they are."""
    array = whole_array(column)
    if pa.types.is_large_list(array.type):
        offsets = array.offsets.to_numpy().astype(np.int64)
        return _own(array.flatten()), torch.from_numpy(offsets - offsets[0])
    if pa.types.is_fixed_size_list(array.type):
        return _own(array.flatten()).view(len(array), array.type.list_size)
    return _own(array)


def _own(array: Any) -> Tensor:
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        array = array.dictionary_encode().indices.cast(pa.int64())
    return torch.from_numpy(np.array(array.to_numpy(zero_copy_only=False)))


class SampleNumbers:
    """Source of the ``numbers`` of samples that are in memory elsewhere, in a column ``number``: one part."""

    identity = ""

    def __init__(self, numbers: npt.NDArray[np.int64]) -> None:
        self._rows = SampleRows(pa.table({"number": numbers}), len(numbers))
        self.part_rows = [len(numbers)]

    def read(self, part: int) -> SampleRows:
        del part
        return self._rows
