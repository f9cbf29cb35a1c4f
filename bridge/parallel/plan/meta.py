"""Operations on the meta device, where tensors have shapes and no values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_LIKE_FIRST = {"add", "sub", "mul", "div", "sqrt", "_prelu_kernel", "ones_like"}
_KEEPS_SHAPE = {torch.Tag.pointwise, torch.Tag.nondeterministic_seeded}
"""Tags of operations whose in-place form changes only values."""


class MetaMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes result shapes of the operations of residual networks while it is entered; torch does those of all
    others.

    torch's are the same, but it decomposes operations in Python, and imports its compiler for that: over a second.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping would import it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        del types
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            if func._schema.is_mutable and _KEEPS_SHAPE.intersection(func.tags):
                return args[0]
            if (made := _made(func._overloadpacket.__name__, args, kwargs or {})) is not None:
                return made
        return func(*args, **(kwargs or {}))


def meta_like(tensor: Tensor) -> Tensor:
    """Return an empty tensor of the same shape, strides and type on the meta device."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _made(name: str, args: Any, kwargs: Any) -> Any:
    """Return an operation's result; None: torch computes it, or raises."""
    first: Tensor = args[0]
    if name in _LIKE_FIRST and not kwargs.get("dtype") and _are_like(first, args[1:]):
        return meta_like(first)
    if name == "_prelu_kernel_backward":  # of the weight, too, before it is summed
        return meta_like(args[1]), meta_like(args[1])
    if name in ("native_batch_norm", "native_batch_norm_backward"):
        maps = args[1] if name.endswith("backward") else first
        return meta_like(maps), maps.new_empty(maps.shape[1]), maps.new_empty(maps.shape[1])
    if name == "convolution" and not args[6] and first.shape[1] == args[1].shape[1] * args[8]:
        axes = zip(first.shape[2:], args[1].shape[2:], *args[3:6], strict=True)
        sides = [(side + 2 * pad - far * (kernel - 1) - 1) // stride + 1 for side, kernel, stride, pad, far in axes]
        return first.new_empty(len(first), len(args[1]), *sides) if min(sides) > 0 else None
    if name == "convolution_backward":
        shapes = zip((args[1].shape, args[2].shape, first.shape[1:2]), args[-1], strict=True)
        return tuple(first.new_empty(shape) if is_wanted else None for shape, is_wanted in shapes)
    if name == "sum" and args[2:] == (True,):
        return first.new_empty([1 if axis in args[1] else side for axis, side in enumerate(first.shape)])
    if name in ("mm", "addmm") and args[-2].shape[1] == args[-1].shape[0]:
        return first.new_empty(len(args[-2]), args[-1].shape[1])
    return None


def _are_like(tensor: Tensor, others: Sequence[Any]) -> bool:
    """Return whether an elementwise result of all of them has the shape and type of ``tensor``."""
    return tensor.is_floating_point() and all(
        (other.dtype == tensor.dtype and np.broadcast_shapes(other.shape, tensor.shape) == tensor.shape)
        or (other.ndim == 0 < tensor.ndim and not other.is_complex())
        for other in others
        if isinstance(other, Tensor)
    )
