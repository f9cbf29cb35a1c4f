"""Momentum for tables all of whose rows are pushed each step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from geartrain.ams.values.arguments import real_number
from geartrain.ams.values.optimizers.spec import RowOptimizerSpec, Slot, flag, require, require_rate


def require_momentum(momentum: float) -> None:
    """Raise InvalidArgument unless it lies in [0, 1)."""
    real_number("momentum", momentum)
    require(0 <= momentum < 1, f"momentum is {momentum!r}; it must lie in [0, 1)")


@dataclass(frozen=True)
class Momentum(RowOptimizerSpec):
    """v ← momentum · v + g + weight_decay · w;  w ← w − lr · v (nesterov: w ← w − lr · (g + momentum · v)).

    The form of ``torch.optim.SGD``, for tables all of whose rows are pushed each step.
    """

    lr: float
    """Learning rate; a push may carry another one."""
    momentum: float = 0.9
    """Decay μ of the velocity, in [0, 1)."""
    weight_decay: float = 0.0
    """L2 coefficient λ added to the gradient as λ·w."""
    nesterov: bool = False
    """Look ahead along the velocity."""

    name: ClassVar[str] = "momentum"
    slots: ClassVar[tuple[Slot, ...]] = (Slot("momentum"),)
    state: ClassVar[str] = "momentum"

    def __post_init__(self) -> None:
        require_rate("lr", self.lr)
        require_rate("weight_decay", self.weight_decay)
        require_momentum(self.momentum)

    @classmethod
    def from_scalars(cls, scalars: Mapping[str, float]) -> Self:
        rest = dict(scalars)
        return cls(nesterov=flag("nesterov", rest.pop("nesterov", 0)), **rest)
