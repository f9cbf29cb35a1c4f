"""Class heads among the modules of a model."""

from __future__ import annotations

from torch import nn

from geartrain.bridge.head.backends.backend import RowBackend


def backend_of(module: nn.Module) -> RowBackend | None:
    """What keeps the rows of a class head; None for any other module."""
    backend = getattr(module, "backend", None)
    return backend if hasattr(module, "row_update") else None
