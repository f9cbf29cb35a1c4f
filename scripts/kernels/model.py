"""What a kernel must cost on a device: the larger of its bytes over the bandwidth and its products over their peak."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from geartrain.bridge.kernels.launch import Cost


@dataclass(frozen=True)
class Device:
    """A GPU as a large copy and a large product see it."""

    name: str
    bandwidth: float
    """Bytes a second that a copy moves, read and written."""
    products: float
    """Operations a second of products in 16 bits."""
    single: float = 45e12
    """Of products in float32."""

    def seconds(self, cost: Cost) -> float:
        """What the kernel takes at least."""
        peak = self.products if cost.dtype in (torch.bfloat16, torch.float16) else self.single
        return max(cost.num_bytes / self.bandwidth, cost.flops / peak)


DEVICES = {device.name: device for device in (Device("H100", 3.0e12, 600e12), Device("H200", 4.3e12, 600e12))}
