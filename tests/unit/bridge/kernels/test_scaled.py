"""Rows and slots of 8 bits."""

from __future__ import annotations

import pytest
import torch

from geartrain.bridge.kernels.scaled import narrowed, widened

DTYPES = (torch.float8_e4m3fn, torch.int8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 128, 300])
@pytest.mark.parametrize("size", [1e-20, 0.0, 1.0, 1e30])
def test_what_was_read_is_written_as_it_was(dtype: torch.dtype, dim: int, size: float) -> None:
    values = torch.randn(50, dim, generator=torch.Generator().manual_seed(dim)) * size
    codes, scales = narrowed(values, dtype)
    read = widened(codes, scales, torch.bfloat16)
    torch.testing.assert_close(read.float(), values, rtol=0.07, atol=size * 0.05)
    again = narrowed(read, dtype)
    assert torch.equal(widened(*again, torch.float32), read.float())
    assert torch.equal(widened(codes, scales, torch.float32), read.float())  # exact in bfloat16


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_rows_have_no_codes(dtype: torch.dtype) -> None:
    codes, scales = narrowed(torch.empty(0, 300), dtype)
    assert widened(codes, scales, torch.float32).shape == (0, 300)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_by_chance_keeps_the_mean(dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    values = torch.randn(1, 64, generator=random).expand(20_000, 64)
    drawn = torch.randint(0, 2**16, values.shape, generator=random, dtype=torch.int32)
    read = widened(*narrowed(values, dtype, drawn), torch.float64)
    step = (read.amax(0) - read.amin(0)).clamp(min=1e-6)
    assert ((read.mean(0) - values[0]).abs() < 0.02 * step + 1e-7).all()
    assert (read.unique(dim=0).amax(0) - read.unique(dim=0).amin(0) > 0).any()


def test_a_code_that_is_float8_rounds_to_the_nearest_as_pytorch_does() -> None:
    values = torch.rand(1, 4000, generator=torch.Generator().manual_seed(0)) * 448
    values[0, 0] = 448  # so that the scale is 1
    codes, scales = narrowed(values, torch.float8_e4m3fn)
    assert scales == 1 and torch.equal(codes.float(), values.to(torch.float8_e4m3fn).float())
