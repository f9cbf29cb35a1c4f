"""Plain gradient descent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from geartrain.ams.values.optimizers.spec import RowOptimizerSpec, require_rate


@dataclass(frozen=True)
class SGD(RowOptimizerSpec):
    """w ← w − lr · (g + weight_decay · w)."""

    lr: float
    """Learning rate; a push may carry another one."""
    weight_decay: float = 0.0
    """L2 coefficient λ added to the gradient as λ·w."""

    name: ClassVar[str] = "sgd"

    def __post_init__(self) -> None:
        require_rate("lr", self.lr)
        require_rate("weight_decay", self.weight_decay)
