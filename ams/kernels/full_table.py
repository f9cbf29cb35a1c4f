"""What a dense table takes once all of its rows were written, told without making it."""

from __future__ import annotations

from dataclasses import dataclass

from geartrain.ams.kernels import _core
from geartrain.ams.values.specs import Ids, TableSpec


@dataclass(frozen=True)
class FullDenseTable:
    """Sizes of a dense table on the shard that owns some buckets, once every row of those was written.

    The layout itself says them (``csrc/index/dense_items.cpp``), so ``memory_bytes`` is that of the
    ``RowTable``.
    """

    rows: int
    items: int
    """Rows that there is memory for: it comes in chunks."""
    index_bytes: int
    item_bytes: int
    """Of a row and all that belongs to it."""

    @classmethod
    def of(cls, spec: TableSpec, owned_buckets: Ids) -> FullDenseTable:
        """Tell it of a table with ``num_rows``; ``owned_buckets`` ascending, are the shard's."""
        assert spec.num_rows is not None
        item_bytes = spec.row_bytes + spec.slot_bytes + spec.step_bytes + spec.life_bytes
        rows, items, index_bytes = _core.full_dense_table(owned_buckets, spec.num_rows, item_bytes)
        return cls(rows, items, index_bytes, item_bytes)

    @property
    def spare_bytes(self) -> int:
        """Of chunks, beside the rows."""
        return (self.items - self.rows) * self.item_bytes

    @property
    def memory_bytes(self) -> int:
        """All of it."""
        return self.items * self.item_bytes + self.index_bytes
