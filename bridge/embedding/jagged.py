"""Jagged tensors made of values and offsets."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

try:
    # Of its public name torch 2.13 warns every user: torch itself calls there what it tells others not to.
    from torch.nested._internal.nested_tensor import nested_view_from_values_offsets as _view
except ImportError:
    _view = torch.nested.nested_tensor_from_jagged  # type: ignore[assignment]


def jagged_tensor(values: Tensor, offsets: Tensor) -> Tensor:
    """A nested tensor of layout torch.jagged [B, ?, ...] that is a view of ``values`` [N, ...].

    ``offsets`` [B + 1] on the same device go from 0 to N; they are not checked.
    """
    return cast("Tensor", _view(values, offsets))  # type: ignore[no-untyped-call]
