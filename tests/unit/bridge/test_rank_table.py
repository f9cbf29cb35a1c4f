"""The rows of one rank."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from geartrain.ams.specs import DTypeName, SparseMomentum, TableSpec
from geartrain.bridge.heads import rank_table
from geartrain.bridge.heads.batch import Arithmetic, Workspace
from geartrain.bridge.heads.rank_table import RankTable
from geartrain.bridge.heads.scratch import Scratch


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("rank", "num_local"), [(0, 1), (1, 0)])
def test_a_rank_may_have_no_class(dtype: DTypeName, rank: int, num_local: int) -> None:
    spec = TableSpec(name="t", dim=5, num_rows=1, optimizer=SparseMomentum(0.1), dtype=dtype, slot_dtype=dtype)
    table = RankTable(spec, cast(Any, SimpleNamespace(world_size=2, rank=rank)), torch.device("cpu"))
    assert table.rows_LD.shape == (num_local, 5) and table.slots_LD is not None
    table.assign(np.zeros(1, np.int64), np.ones((1, 5), spec.numpy_dtype))
    assert (table.rows_LD == 1).all() and (table.slots_LD == 0).all()


class _InputsOfSums(TorchDispatchMode):
    """Notes of which types the sums are."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch.ops.aten.sum.dim_IntList:
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sixteen_bits_are_summed_in_scratch_and_not_in_a_copy_of_pytorchs(dtype: torch.dtype) -> None:
    work = Workspace(Arithmetic.of(torch.empty(0)), Scratch())
    values = torch.arange(12, dtype=dtype).view(3, 4)
    with _InputsOfSums() as noted:
        sums = rank_table._sums(work, values)
    assert (sums.dtype, sums.tolist()) == (torch.float32, [6, 22, 38])
    assert noted.dtypes == [torch.float32]  # of another type it would make a copy of all


def test_rows_that_move_leave_no_memory_behind_on_the_old_device() -> None:
    spec = TableSpec(name="t", dim=4, num_rows=3, optimizer=SparseMomentum(0.1))
    table = RankTable(spec, cast(Any, SimpleNamespace(world_size=1, rank=0)), torch.device("cpu"))
    buffer = table.pool.take(1000, table.device)
    left = weakref.ref(buffer)
    table.pool.give_back(buffer)
    del buffer
    assert left() is not None
    table.move_to(torch.device("meta"))
    assert left() is None
