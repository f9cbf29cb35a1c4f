"""The rows of one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from geartrain.ams.specs import DTypeName, SparseMomentum, TableSpec
from geartrain.bridge.heads.rank_table import RankTable


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("rank", "num_local"), [(0, 1), (1, 0)])
def test_a_rank_may_have_no_class(dtype: DTypeName, rank: int, num_local: int) -> None:
    spec = TableSpec(name="t", dim=5, num_rows=1, optimizer=SparseMomentum(0.1), dtype=dtype, slot_dtype=dtype)
    table = RankTable(spec, cast(Any, SimpleNamespace(world_size=2, rank=rank)), torch.device("cpu"))
    assert table.rows_LD.shape == (num_local, 5) and table.slots_LD is not None
    table.assign(np.zeros(1, np.int64), np.ones((1, 5), spec.numpy_dtype))
    assert (table.rows_LD == 1).all() and (table.slots_LD == 0).all()
