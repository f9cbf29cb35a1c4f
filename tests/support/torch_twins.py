"""Optimizers of rows with the ones of torch that they are on rows that all have a gradient.

Where torch has none, the twin is written by hand from the source that the optimizer names.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from geartrain.ams.values.optimizers.registry import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Momentum,
    RMSProp,
    RowOptimizerSpec,
    RowWiseAdagrad,
    RowWiseAdam,
    SparseMomentum,
)
from tests.support.written_optimizers import FollowTheLeader, OneSecondMomentARow, OneSumARow

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
    "rowwise_adagrad": (
        RowWiseAdagrad(0.05, 0.1, 0.01, 0.2, 1e-5),
        lambda weights: OneSumARow([weights], lr=0.05, lr_decay=0.1, weight_decay=0.01, start=0.2, eps=1e-5),
    ),
    "rowwise_adam": (
        RowWiseAdam(0.05, (0.8, 0.99), 1e-5, 0.3),
        lambda weights: OneSecondMomentARow([weights], lr=0.05, betas=(0.8, 0.99), eps=1e-5, weight_decay=0.3),
    ),
    "rmsprop": (
        RMSProp(0.05, 0.9, 1e-3, 0.01, 0.8, centered=True),
        lambda weights: torch.optim.RMSprop([weights], 0.05, 0.9, 1e-3, 0.01, 0.8, centered=True),
    ),
    "ftrl": (
        FTRL(0.05, 0.5, 0.02, 0.3),
        lambda weights: FollowTheLeader([weights], lr=0.05, beta=0.5, l1=0.02, l2=0.3),
    ),
}
"""By the optimizer's name, with settings that all matter."""
