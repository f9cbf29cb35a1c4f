"""A model without its values, as rank 0 of some ranks would have it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.bridge.parallel.plan.costs.head_costs import HeadSkeleton
from geartrain.bridge.parallel.split.heads import backend_of

_META = torch.device("meta")


def skeleton_of(model: nn.Module) -> nn.Module:
    """A copy of ``model`` on the meta device; nothing of its parameters and buffers is copied or allocated.

    Class heads, whose rows are no parameters, become :class:`HeadSkeleton`.
    """
    known: dict[int, Any] = {}
    for module in model.modules():
        if (backend := backend_of(module)) is not None:
            known[id(module)] = HeadSkeleton(str(module.name), None if backend.local is None else backend.settings)
            continue
        for parameter in module.parameters(recurse=False):
            known[id(parameter)] = nn.Parameter(_on_meta(parameter), requires_grad=parameter.requires_grad)
        for buffer in module.buffers(recurse=False):
            known[id(buffer)] = _on_meta(buffer)
    return copy.deepcopy(model, known).train()


def without_values(example: Any, batch: int | None) -> tuple[Any, int]:
    """The tensors of ``example`` on the meta device, with ``batch`` samples (None: as many as there are); how many.

    The first dimension of its first tensor counts samples; tensors as long as that become as long as ``batch``. Raises
    InvalidArgument for an example without a tensor.
    """
    sizes: list[int] = []

    def found(value: Any) -> Any:
        if isinstance(value, Tensor) and value.ndim:
            sizes.append(len(value))
        return value

    tree_map(found, example)
    if not sizes or not sizes[0]:
        raise InvalidArgument(
            f"example is {quoted(example)}; it must be a rank's batch as the model takes it, such as (images, labels)"
        )
    samples = sizes[0] if batch is None else batch

    def resized(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        rows = [samples] if value.ndim and len(value) == sizes[0] else list(value.shape[:1])
        return torch.empty([*rows, *value.shape[1:]], dtype=value.dtype, device=_META)

    return tree_map(resized, example), samples


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device=_META)
