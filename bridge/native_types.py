"""In which narrow types a device multiplies faster than in float32: others cost accuracy for nothing."""

from __future__ import annotations

import torch


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether products in bfloat16 are the faster ones; of a CPU they are only where it has AMX (decision 0022)."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        return bool(torch.cpu._is_amx_tile_supported())
    return False


def product_type(device: torch.device, wanted: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """The type of products where autocast asks for ``wanted``: that, or ``compute`` on a CPU that is faster in it."""
    is_fast = device.type != "cpu" or (wanted == torch.bfloat16 and has_fast_bfloat16(device))
    return wanted if is_fast else compute
