"""Optimizers of rows with the ones of torch that they are on rows that all have a gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from geartrain.ams.values.optimizers.registry import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Momentum,
    RowOptimizerSpec,
    SparseMomentum,
)

OfTorch = Callable[[Tensor], torch.optim.Optimizer]

TORCH_TWINS: dict[str, tuple[RowOptimizerSpec, OfTorch]] = {
    "sgd": (SGD(0.05, 0.01), lambda weights: torch.optim.SGD([weights], 0.05, weight_decay=0.01)),
    "momentum": (
        Momentum(0.05, 0.8, 0.01, nesterov=True),
        lambda weights: torch.optim.SGD([weights], 0.05, momentum=0.8, weight_decay=0.01, nesterov=True),
    ),
    "sparse_momentum": (
        SparseMomentum(0.05, 0.8, 0.01),
        lambda weights: torch.optim.SGD([weights], 0.05, momentum=0.8, weight_decay=0.01),
    ),
    "adam": (
        Adam(0.05, (0.8, 0.99), 1e-5, 0.01),
        lambda weights: torch.optim.Adam([weights], 0.05, (0.8, 0.99), 1e-5, 0.01),
    ),
    "adagrad": (
        Adagrad(0.05, 0.1, 0.01, 0.2, 1e-5),
        lambda weights: torch.optim.Adagrad([weights], 0.05, 0.1, 0.01, 0.2, 1e-5),
    ),
    "adamw": (
        AdamW(0.05, (0.8, 0.99), 1e-5, 0.3),
        lambda weights: torch.optim.AdamW([weights], 0.05, (0.8, 0.99), 1e-5, 0.3),
    ),
}
"""By the optimizer's name, with settings that all matter."""
