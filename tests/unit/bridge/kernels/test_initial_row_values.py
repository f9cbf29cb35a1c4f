"""First values of rows, made by the kernel in Triton's interpreter and in tensor operations: those of a shard."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from geartrain.ams.tables.compiled_store import distribution_of, table_hash
from geartrain.ams.tables.row_table import RowTable
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.specs import Constant, DTypeName, Initializer, Normal, TableSpec, Uniform
from geartrain.bridge.kernels.initial_values import FirstValues, write_initial_values, write_new_rows
from geartrain.bridge.kernels.launch import interpreted
from geartrain.bridge.rows.tables import TORCH_DTYPES, as_numpy

pytest.importorskip("triton")
WAYS: dict[str, Callable[[], Any]] = {"kernel": interpreted, "tensors": nullcontext}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dim", [3, 37, 520])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("initializer", "first_id", "seed"),
    [(Normal(0.1, 0.3), 7, 2**64 - 3), (Uniform(-1, 0.7), 2**33 + 5, 3), (Constant(0.3), 0, 0)],
    ids=repr,
)
def test_they_are_those_of_a_shard(
    initializer: Initializer, first_id: int, seed: int, dtype: DTypeName, dim: int, way: str
) -> None:
    spec = TableSpec(
        name="t", dim=dim, num_rows=2**34, initializer=initializer, dtype=dtype, seed=seed, optimizer=SGD(0.1)
    )
    theirs = np.empty((50, dim), spec.numpy_dtype)
    RowTable(spec, np.arange(4096)).pull(np.arange(first_id, first_id + 50), theirs)
    ours = torch.full((50, dim), float("nan"), dtype=TORCH_DTYPES[dtype])
    values = FirstValues(*distribution_of(initializer)[:3], seed, table_hash("t"))
    with WAYS[way]():
        write_initial_values(ours, first_id, values)
    assert as_numpy(ours).tobytes() == theirs.tobytes()
    if way == "kernel":
        some = torch.full((60, dim), float("nan"), dtype=TORCH_DTYPES[dtype])
        places, numbers = torch.tensor([4, 30, 8, 7, 30, 9]), torch.tensor([50, 2, 4, -1, 2, 0])
        keys = torch.tensor([5, 5, 1, 5, 5, 6])  # of table 1, and one of table 0, which is not meant
        with interpreted():
            write_new_rows([None, (some, values)], keys, 2, first_id + places, numbers)
        assert torch.equal(some[[50, 2, 0]].view(torch.uint8), ours[[4, 30, 9]].view(torch.uint8))
        assert some.isnan().all(1).sum() == 57
