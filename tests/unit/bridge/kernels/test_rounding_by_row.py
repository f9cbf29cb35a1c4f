"""Rounding by chance, each row under its own key: the kernel in Triton's interpreter, and tensor operations."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from geartrain.bridge.kernels.launch import interpreted
from geartrain.bridge.kernels.rounding import ROW, SLOT, round_rows

pytest.importorskip("triton")
WAYS: dict[str, Callable[[], Any]] = {"kernel": interpreted, "tensors": nullcontext}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("num", "dim"), [(5, 3), (70, 37), (3, 520)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("part", [ROW, SLOT])
def test_rows_are_rounded_as_each_is_under_its_key(part: int, dtype: torch.dtype, num: int, dim: int, way: str) -> None:
    random = torch.Generator().manual_seed(num)
    values = torch.randn(num, dim, generator=random) * 10.0 ** torch.randint(-9, 4, (num, 1), generator=random)
    values[0, :3] = torch.tensor([float("nan"), float("inf"), -3e38])
    ids, numbers = torch.randint(2**62, (num,), generator=random), torch.randint(1, 2**40, (num,), generator=random)
    keys = torch.tensor([2**63 - 1, -5, 7], dtype=torch.int64).repeat(num)[:num]
    with WAYS[way]():
        found = round_rows(values, dtype, key=keys, ids_N=ids, numbers_N=numbers, part=part)
    for key in set(keys.tolist()):
        own = keys == key
        expected = round_rows(values[own], dtype, key=key % 2**64, ids_N=ids[own], numbers_N=numbers[own], part=part)
        torch.testing.assert_close(found[own], expected, rtol=0, atol=0, equal_nan=True)
