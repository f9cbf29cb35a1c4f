"""Samples that are rows of Arrow tables, and their columns as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from geartrain.workers.samples.batches import SampleBatch, Values
from geartrain.workers.samples.columns import whole_array


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
        return FlatRows(pa.concat_tables([self._table, *(part._table for part in others)])) if others else self

    def batch(self, cursors: Mapping[int, tuple[int, int]]) -> SampleBatch:
        """See SampleRows."""
        return SampleBatch(tensors_of(self._table), self.num_rows, cursors)


def tensors_of(table: Any) -> dict[str, Values]:
    """The columns of an Arrow table whose types are those of samples, with nothing missing. Copies them."""
    return {name: _tensors(whole_array(table.column(name))) for name in table.column_names}


def _tensors(array: Any) -> Values:
    if pa.types.is_large_list(array.type):
        offsets = array.offsets.to_numpy().astype(np.int64)
        return _own(array.flatten()), torch.from_numpy(offsets - offsets[0])
    if pa.types.is_fixed_size_list(array.type):
        return _own(array.flatten()).view(len(array), array.type.list_size)
    return _own(array)


def _own(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array.to_numpy(zero_copy_only=False)))
