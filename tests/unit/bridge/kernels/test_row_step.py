"""What kernels do with rows in registers, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from geartrain.bridge.kernels.rounding import round_rows

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from geartrain.bridge.kernels.triton.row_step import draws, fits, rounded  # noqa: E402


@triton.jit
def _round(values, ids, numbers, out, fit, key, dim, part: tl.constexpr, rows: tl.constexpr, width: tl.constexpr):
    n, c = tl.arange(0, rows), tl.arange(0, width)
    at = n[:, None] * dim + c[None, :]
    mask = (c < dim)[None, :] & (n >= 0)[:, None]
    value = tl.load(values + at, mask=mask, other=0.0)
    drawn = draws(key, tl.load(ids + n), tl.load(numbers + n), 0, part, width)
    tl.store(out + at, rounded(value, drawn, out.dtype.element_ty), mask=mask)
    tl.store(fit + at, fits(value, out.dtype.element_ty).to(tl.int8), mask=mask)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("dim", "width"), [(1, 8), (37, 64), (128, 128)])
def test_rounding_has_the_bits_of_the_reference(dtype: torch.dtype, dim: int, width: int) -> None:
    random = np.random.default_rng(dim)
    values = torch.from_numpy(random.integers(0, 2**32, (64, dim), dtype=np.uint32).view(np.float32))
    values[:32] = torch.from_numpy(random.standard_normal((32, dim)) * 2.0 ** random.integers(-45, 17, (32, dim)))
    ids = torch.from_numpy(random.integers(0, 2**63 - 1, 64))
    numbers = torch.from_numpy(random.integers(1, 2**40, 64))
    fit = torch.zeros(64, dim, dtype=torch.int8)
    for part, key in enumerate((2**64 - 5, 77)):
        out = torch.full((64, dim), float("nan"), dtype=dtype)
        _round[(1,)](values, ids, numbers, out, fit, key, dim, part=part, rows=64, width=width)
        expected = round_rows(values, dtype, key=key, ids_N=ids, numbers_N=numbers, part=part)
        assert torch.equal(fit == 1, torch.isfinite(expected))
        assert torch.equal(out[fit == 1].view(torch.uint8), expected[fit == 1].view(torch.uint8))
