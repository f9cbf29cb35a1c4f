"""Samples of trees in memory: a table for each level, and for each sample the place of its node in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from geartrain.ams.values.specs import Ids
from geartrain.bridge.embedding.levels import Nodes
from geartrain.workers.samples.batches import SampleBatch
from geartrain.workers.samples.flat_rows import tensors_of


class TreeRows:
    """A :class:`~geartrain.workers.samples.source.SampleRows` whose samples share the rows of outer levels."""

    def __init__(self, levels: Mapping[str, tuple[Any, Ids]], leaves: Any, num_rows: int) -> None:
        """``levels``: of each but the last its table, and the row [num_rows] of each sample in it; outermost first.
        ``leaves`` is the table of the last.
        """
        self._levels, self._leaves, self._num_rows = levels, leaves, num_rows

    @property
    def num_rows(self) -> int:
        """See SampleRows."""
        return self._num_rows

    def slice(self, first: int, count: int) -> TreeRows:
        """See SampleRows."""
        end = min(self._num_rows, first + count)
        levels = {level: (table, places[first:end]) for level, (table, places) in self._levels.items()}
        return TreeRows(levels, self._leaves.slice(first, count), end - first)

    def shuffled(self, random: np.random.Generator) -> TreeRows:
        """See SampleRows. Trees stay together: they change places."""
        roots = next(iter(self._levels.values()))[1]
        starts = np.flatnonzero(np.diff(roots, prepend=-1))
        lengths = np.diff(np.append(starts, len(roots)))
        trees = random.permutation(len(starts))
        starts, lengths = starts[trees], lengths[trees]
        order = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(len(roots))
        levels = {level: (table, places[order]) for level, (table, places) in self._levels.items()}
        return TreeRows(levels, self._leaves.combine_chunks().take(pa.array(order)), self._num_rows)

    def joined(self, others: Sequence[TreeRows]) -> TreeRows:
        """See SampleRows. Tables that several have are there once."""
        if not others:
            return self
        parts = [self, *others]
        levels = {level: _joined([part._levels[level] for part in parts]) for level in self._levels}
        leaves = pa.concat_tables([part._leaves for part in parts])
        return TreeRows(levels, leaves, sum(part._num_rows for part in parts))

    def batch(self, cursors: Mapping[int, tuple[int, int]]) -> SampleBatch:
        """See SampleRows."""
        columns = {}
        level_of: dict[str, str] = {}
        nodes: dict[str, Nodes] = {}
        for level, (table, places) in self._levels.items():
            kept, index = np.unique(places, return_inverse=True)
            nodes[level] = Nodes(torch.from_numpy(index.astype(np.int64)), len(kept))
            columns.update(tensors_of(table.take(pa.array(kept))))
            level_of.update(dict.fromkeys(table.column_names, level))
        columns.update(tensors_of(self._leaves))
        return SampleBatch(columns, self._num_rows, cursors, level_of, nodes)


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
