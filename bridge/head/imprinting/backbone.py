"""Call of a backbone with a tensor, a tuple of its arguments, or a dict of them by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import InvalidArgument

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""Arguments of a backbone: the only one, a tuple of all, or a dict of all by name."""


def run(backbone: nn.Module, inputs: Inputs) -> Tensor:
    """Return features [N, D] of ``inputs``. Raises InvalidArgument for other arguments than the backbone's."""
    if hasattr(inputs, "to") and not isinstance(inputs, Mapping):  # also a packed sequence, which is a tuple
        return backbone(inputs)  # type: ignore[no-any-return]
    found = bound(backbone, inputs)
    return backbone(*found.args, **found.kwargs)  # type: ignore[no-any-return]


def bound(backbone: nn.Module, inputs: tuple[Any, ...] | Mapping[str, Any]) -> inspect.BoundArguments:
    """Return the arguments of ``forward``. Raises InvalidArgument."""
    try:
        signature = inspect.signature(backbone.forward)
        return signature.bind(**inputs) if isinstance(inputs, Mapping) else signature.bind(*inputs)
    except TypeError as exc:
        raise InvalidArgument(
            f"{type(backbone).__name__} does not take these inputs: {exc}. A tuple holds the arguments of its forward, "
            "(argument,) where the only one is a tuple itself; a dict holds them by name"
        ) from exc


def moved(inputs: Any, device: torch.device) -> Any:
    """Return ``inputs`` with their tensors on ``device``."""
    if isinstance(inputs, Mapping):
        return {name: moved(item, device) for name, item in inputs.items()}
    if hasattr(inputs, "to"):
        return inputs.to(device)
    return tuple(moved(item, device) for item in inputs) if isinstance(inputs, tuple) else inputs
