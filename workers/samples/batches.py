"""Batches of samples as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from geartrain.bridge.embedding.levels import Nodes

Values = Tensor | tuple[Tensor, Tensor]


class SampleBatch(dict[str, Values]):
    """The columns of B samples by name, as ``EmbeddingGroup`` takes them.

    A column of single values is a tensor [B], one of lists ``(values, offsets)`` with B + 1 offsets, one of lists of L
    values [B, L]. Ids are int64; floats are float32 or float64, as the source has them.

    Of sample trees, and with ``dedup``, a batch has levels: a column that is in :attr:`level_of` has a value for each
    of the N nodes of that level instead of the B samples, and ``index[level]`` [B] says which node a sample has.
    ``EmbeddingGroup``, ``gt.per_level`` and ``gt.LevelLinear`` know that.
    """

    num_samples: int
    """B."""
    cursors: Mapping[int, tuple[int, int]]
    """Where the data streams that it was read from go on after it: (epoch, position) by stream."""

    level_of: Mapping[str, str]
    """The level of each column that has values by node."""
    nodes: Mapping[str, Nodes]
    """The nodes of each level, the outermost first."""

    def __init__(
        self,
        columns: Mapping[str, Values],
        num_samples: int,
        cursors: Mapping[int, tuple[int, int]],
        level_of: Mapping[str, str] | None = None,
        nodes: Mapping[str, Nodes] | None = None,
    ) -> None:
        super().__init__(columns)
        self.num_samples = num_samples
        self.cursors = cursors
        self.level_of, self.nodes = level_of or {}, nodes or {}
        self.is_committed_by: object = None

    @property
    def index(self) -> dict[str, Tensor]:
        """Of each level the node of each sample, int64 [B]."""
        return {level: nodes.index for level, nodes in self.nodes.items()}

    @property
    def parents(self) -> dict[str, Tensor]:
        """Of trees: of each level but the outermost, for each of its nodes that of the level before; int64 [N]."""
        found: dict[str, Tensor] = {}
        for (_, before), (level, nodes) in pairwise(self.nodes.items()):
            samples, starts = nodes.by_node
            found[level] = before.index[samples[starts]]
        return found


class FlatRows:
    """Samples that are rows of an Arrow table: a :class:`~geartrain.workers.samples.source.SampleRows`."""

    def __init__(self, table: Any) -> None:
        self._table = table

    @property
    def table(self) -> Any:
        """The rows."""
        return self._table

    @property
    def num_rows(self) -> int:
        """See SampleRows."""
        return int(self._table.num_rows)

    def slice(self, first: int, count: int) -> FlatRows:
        """See SampleRows."""
        return FlatRows(self._table.slice(first, count))

    def shuffled(self, random: np.random.Generator) -> FlatRows:
        """See SampleRows."""
        order = random.permutation(self.num_rows)
        return FlatRows(self._table.combine_chunks().take(pa.array(order)))

    def joined(self, others: Sequence[FlatRows]) -> FlatRows:
        """See SampleRows."""
        return FlatRows(pa.concat_tables([self._table, *(one._table for one in others)])) if others else self

    def batch(self, cursors: Mapping[int, tuple[int, int]]) -> SampleBatch:
        """See SampleRows."""
        return SampleBatch(tensors_of(self._table), self.num_rows, cursors)


def tensors_of(table: Any) -> dict[str, Values]:
    """The columns of an Arrow table whose types are those of samples, with nothing missing. Copies them."""
    return {name: _tensors(table.column(name).combine_chunks()) for name in table.column_names}


def _tensors(array: Any) -> Values:
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if pa.types.is_large_list(array.type):
        offsets = array.offsets.to_numpy().astype(np.int64)
        return _own(array.flatten()), torch.from_numpy(offsets - offsets[0])
    if pa.types.is_fixed_size_list(array.type):
        return _own(array.flatten()).view(len(array), array.type.list_size)
    return _own(array)


def _own(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array.to_numpy(zero_copy_only=False)))
