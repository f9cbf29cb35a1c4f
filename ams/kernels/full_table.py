"""Memory of a dense table once all of its rows were written, computed without making it."""

from __future__ import annotations

from dataclasses import dataclass

from geartrain.ams.kernels import _core
from geartrain.ams.values.specs import Ids, TableSpec


@dataclass(frozen=True)
class FullDenseTable:
    """Sizes of a dense table on the shard that owns some buckets, once every row of those was written.

    They come from the layout itself (``csrc/index/dense_items.cpp``), so ``memory_bytes`` is that of the ``RowTable``.
    """

    rows: int
    items: int
    """Rows that have memory: it is allocated in chunks."""
    index_bytes: int
    item_bytes: int
    """Bytes of a row with its slots, step and life."""

    @classmethod
    def of(cls, spec: TableSpec, owned_buckets: Ids) -> FullDenseTable:
        """Return the sizes of a table with ``num_rows``; ``owned_buckets``, ascending, are the shard's."""
        assert spec.num_rows is not None
        item_bytes = spec.row_bytes + spec.slot_bytes + spec.step_bytes + spec.life_bytes
        rows, items, index_bytes = _core.full_dense_table(owned_buckets, spec.num_rows, item_bytes)
        return cls(rows, items, index_bytes, item_bytes)

    @property
    def spare_bytes(self) -> int:
        """Bytes of chunks that hold no rows."""
        return (self.items - self.rows) * self.item_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of rows, chunks and index."""
        return self.items * self.item_bytes + self.index_bytes
