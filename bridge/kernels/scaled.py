"""Rows and slots of 8 bits: codes, and a scale for each row or block that is a power of two.

Such a scale changes seldom, and a value that the dtype can hold is stored exactly: stochastic rounding adds nothing to
numbers that a step does not change. A code times its scale is a bfloat16 exactly.

Legend: N rows, D numbers of each, K blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
"""Numbers of an int8 slot that share a scale; a float8_e4m3fn row has one."""
LARGEST = {torch.float8_e4m3fn: 448, torch.int8: 127}
_SMALLEST_SCALE = 0x0D800000
"""2^-100, as bits."""


def num_scales(dtype: torch.dtype, dim: int) -> int:
    """Return the number of scales (K) of a row or slot of ``dim`` numbers."""
    return 1 if dtype == torch.float8_e4m3fn else -(-dim // BLOCK)


def narrowed(values_ND: Tensor, dtype: torch.dtype, drawn_ND: Tensor | int = 0x8000) -> tuple[Tensor, Tensor]:
    """Return codes [N, D] of ``dtype`` and scales [N, K], bfloat16: rounded stochastically, or to the nearest.

    ``drawn_ND`` holds 16 random bits each. The result is undefined for values that are not finite or beyond 2^126.
    """
    num, dim = values_ND.shape
    blocks = num_scales(dtype, dim)
    width = dim if blocks == 1 else BLOCK
    values = torch.nn.functional.pad(values_ND.float(), (0, blocks * width - dim)).view(num, blocks, width)
    ratio = (values.abs().amax(2) / LARGEST[dtype]).view(torch.int32)
    scales = ((ratio + 0x7FFFFF) & 0x7F800000).clamp(_SMALLEST_SCALE, 0x7E800000).view(torch.float32)
    scaled = (values / scales.unsqueeze(2)).flatten(1)[:, :dim]
    if dtype == torch.int8:
        away = ((scaled.abs() * 2.0**16).to(torch.int32) + drawn_ND) >> 16
        codes = torch.where(scaled < 0, -away.clamp_(max=127), away.clamp_(max=127)).to(torch.int8)
    else:
        bits = scaled.contiguous().view(torch.int32)
        magnitude = bits & 0x7FFFFFFF
        is_small = magnitude < 0x3C800000  # 2^-6
        small = (torch.where(is_small, scaled.abs() * 2.0**25, 0.0).to(torch.int32) + drawn_ND) >> 16
        away = torch.where(is_small, small, (magnitude - 0x3C000000 + (drawn_ND << 4)) >> 20).clamp_(max=0x7E)
        codes = (away | ((bits >> 24) & 0x80)).to(torch.uint8).view(dtype)
    return codes, scales.to(torch.bfloat16)


def widened(codes_ND: Tensor, scales_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values [N, D] of codes, in ``dtype``."""
    scales_ND = scales_NK.to(torch.float32).repeat_interleave(BLOCK, 1)[:, : codes_ND.shape[1]]
    if codes_ND.dtype == torch.float8_e4m3fn:
        scales_ND = scales_NK.to(torch.float32)
    return (codes_ND.to(torch.float32) * scales_ND).to(dtype)
