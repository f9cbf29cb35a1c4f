"""Optimizers of a job by name: each makes one for the backbone and one for the class centers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import nn

from geartrain.ams.values.optimizers.momentum import Untouched
from geartrain.ams.values.optimizers.registry import SGD, AdamW, RowOptimizerSpec, SparseMomentum


class JobOptimizer(ABC):
    """Base of the entries of :data:`JOB_OPTIMIZERS`."""

    takes_row_momentum: bool
    """Whether a recipe may give the class centers momentum."""
    is_sparsifiable: bool
    """Whether the ranks may exchange only the largest elements of the backbone's gradients."""
    is_for_cosines: bool = False
    """Whether it trains class centers well only under a margin."""
    usual_rate: float | None = None
    """Default learning rate without trials; None: the recipe's."""

    @abstractmethod
    def of_backbone(
        self, parameters: Iterable[nn.Parameter], *, lr: float, momentum: float, weight_decay: float
    ) -> torch.optim.Optimizer:
        """Return the optimizer of the backbone."""

    @abstractmethod
    def of_rows(self, *, lr: float, momentum: float, untouched: Untouched) -> RowOptimizerSpec:
        """Return the optimizer of the class centers."""


class _Sgd(JobOptimizer):
    takes_row_momentum = is_sparsifiable = is_for_cosines = True

    def of_backbone(
        self, parameters: Iterable[nn.Parameter], *, lr: float, momentum: float, weight_decay: float
    ) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=momentum > 0)

    def of_rows(self, *, lr: float, momentum: float, untouched: Untouched) -> RowOptimizerSpec:
        return SGD(lr=lr) if momentum == 0 else SparseMomentum(lr=lr, momentum=momentum, untouched=untouched)


class _AdamW(JobOptimizer):
    takes_row_momentum = is_sparsifiable = False
    usual_rate = 1e-3

    def of_backbone(
        self, parameters: Iterable[nn.Parameter], *, lr: float, momentum: float, weight_decay: float
    ) -> torch.optim.Optimizer:
        del momentum
        return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay)

    def of_rows(self, *, lr: float, momentum: float, untouched: Untouched) -> RowOptimizerSpec:
        del momentum, untouched
        return AdamW(lr=lr, weight_decay=0.0)


JOB_OPTIMIZERS: dict[str, JobOptimizer] = {"sgd": _Sgd(), "adamw": _AdamW()}
