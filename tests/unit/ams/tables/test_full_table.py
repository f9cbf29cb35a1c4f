"""What a full table is said to take against what it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import geartrain as gt
from geartrain.ams.kernels.full_table import FullDenseTable
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.placement import buckets_of_shard, even_placement
from geartrain.ams.values.specs import TableSpec


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 7, 48])
@pytest.mark.parametrize(
    ("num_rows", "dim", "optimizer"),
    [
        (1, 4, gt.SGD(0.1)),
        (3000, 1, gt.SGD(0.1)),
        (70_001, 4, gt.Adam()),
        (1_000_003, 1, gt.SparseMomentum(0.1)),
        (70_001, 5, gt.RowWiseAdagrad()),
        (3000, 1, gt.RowWiseAdam()),
        (9000, 1500, gt.SparseMomentum(0.1, untouched="elapsed")),
    ],
)
def test_it_is_what_the_rows_take(num_rows: int, dim: int, optimizer: Any, shards: int) -> None:
    spec = TableSpec(name="t", dim=dim, num_rows=num_rows, optimizer=optimizer)
    owners = even_placement(shards)
    for shard in {0, shards // 2, shards - 1}:
        owned = buckets_of_shard(owners, shard)
        ids = np.arange(num_rows)
        ids = ids[owners[ids % 4096] == shard]
        table = RowTable(spec, owned)
        for part in np.array_split(ids, 3):
            table.assign(part, np.zeros((len(part), dim), np.float32))
        full = FullDenseTable.of(spec, owned)
        assert (full.rows, full.memory_bytes) == (len(ids), table.memory_bytes)
