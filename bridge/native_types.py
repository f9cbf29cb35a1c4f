"""Which narrow types a device computes in by itself: emulated ones are slower than float32, not faster."""

from __future__ import annotations

import torch


def has_native_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 is computed by the device itself."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return False


def product_type(device: torch.device, wanted: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """The type of products where autocast asks for ``wanted``: that, or ``compute`` on a CPU that would emulate it."""
    is_native = device.type != "cpu" or (wanted == torch.bfloat16 and has_native_bfloat16(device))
    return wanted if is_native else compute
