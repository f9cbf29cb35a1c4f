"""Where narrow types are faster than float32: elsewhere they cost accuracy for nothing."""

from __future__ import annotations

import torch

from geartrain.ams.core.ops import has_bfloat16_class_pass


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether a network is faster in bfloat16; on a CPU it is only where that has AMX (decision 0022)."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type == "cpu":
        return bool(torch.cpu._is_amx_tile_supported())
    return False


def product_type(device: torch.device, wanted: torch.dtype, compute: torch.dtype) -> torch.dtype:
    """The type of a head's products where autocast asks for ``wanted``: that, or ``compute`` on a CPU without AMX.

    There one pass of C++ over float32 rows beats PyTorch operations in any narrow type (decision 0022).
    """
    if device.type != "cpu":
        return wanted
    has_pass = wanted == torch.bfloat16 and compute == torch.float32 and has_bfloat16_class_pass()
    return wanted if has_pass else compute
