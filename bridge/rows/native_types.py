"""Devices on which narrow types are faster than float32: elsewhere they only cost accuracy."""

from __future__ import annotations

import functools
import os

import torch

from geartrain.ams.kernels.ops import has_bfloat16_class_pass, isa

_TORCH_LIMITS = {"baseline": ("default", "SSE41"), "avx2": ("avx2", "AVX2"), "avx512": ("avx512", "AVX512_CORE")}
if os.environ.get("GEARTRAIN_ISA") and isa() in _TORCH_LIMITS:
    # A forced class of processors holds for the whole run. torch reads these at its first operation.
    for name, value in zip(("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA"), _TORCH_LIMITS[isa()], strict=True):
        os.environ.setdefault(name, value)


def has_fast_bfloat16(device: torch.device) -> bool:
    """Return whether a network is faster in bfloat16; on a CPU only with AMX (decision 0022)."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        return has_bfloat16_class_pass()
    return False


@functools.cache
def gives_float32_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the device gives unrounded products of ``dtype``: ``out_dtype`` of newer PyTorch, for CUDA."""
    with torch.autocast(device.type, enabled=False):
        one = torch.ones(16, 16, device=device, dtype=dtype)
        try:
            return bool(torch.mm(one, one, out_dtype=torch.float32).dtype == torch.float32)
        except (RuntimeError, TypeError):
            return False


def product_type(device: torch.device, wanted: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """Return the operand type of a head's products where autocast asks for ``wanted``: that, or ``compute``.

    Sums of products must be float32: a logit rounded to 8 or 11 bits and then multiplied by the scale makes a
    probability wrong by percents. So ``wanted`` is used on a device that gives such sums, and on a CPU with AMX. On
    another CPU one pass of C++ over float32 rows beats PyTorch operations in any narrow type (decision 0022). float64
    stays, as it does under autocast everywhere.
    """
    if compute != torch.float32:
        return compute
    if device.type == "cpu":
        return wanted if wanted == torch.bfloat16 and has_bfloat16_class_pass() else compute
    return wanted if gives_float32_products(device, wanted) else compute
