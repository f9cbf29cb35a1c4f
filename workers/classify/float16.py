"""Training in float16, with parameters in float32 (Micikevicius et al. 2017, as the 100-million-class paper does in
section 3.1) or in float16 themselves (PLSC)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import NonFinite

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
"""Norm layers, which stay in float32: their sums and variances exceed the range of float16."""
_MIN_SCALE = 2.0**-14


class LossScaler(torch.amp.GradScaler):
    """PyTorch's GradScaler, also for gradients in float16. Once no scale helps, :meth:`update` raises NonFinite."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> Any:
        del allow_fp16
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Lower the scale after a skipped step, or raise it after many others."""
        super().update(new_scale)
        if self.get_scale() < _MIN_SCALE:
            raise NonFinite(
                f"the gradients hold NaN or infinity in float16 at every scale of the loss down to {_MIN_SCALE:g}; "
                "lower the learning rates, or train with dtype=float16_masters or bfloat16"
            )


def to_float16(backbone: nn.Module) -> None:
    """Make parameters and buffers float16, except those of norms; inputs and outputs of ``backbone`` stay the same."""
    for module in backbone.modules():
        if not isinstance(module, NORMS):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.data = tensor.data.half() if tensor.is_floating_point() else tensor.data
    backbone.register_forward_pre_hook(_narrowed)
    backbone.register_forward_hook(_widened)


def _narrowed(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(bitmaps.half() / 255 if bitmaps.dtype == torch.uint8 else bitmaps.half() for bitmaps in arguments)


def _widened(_: nn.Module, arguments: tuple[Tensor, ...], features: Tensor) -> Tensor:
    del arguments
    return features.float()
