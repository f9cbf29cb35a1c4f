"""RMSProp: gradients divided by the root of their mean square."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from geartrain.ams.values.arguments import real_number
from geartrain.ams.values.optimizers.momentum import require_momentum
from geartrain.ams.values.optimizers.spec import (
    RowOptimizerSpec,
    Slot,
    require,
    require_divisor,
    require_rate,
)

_VELOCITY, _AVERAGE = Slot("velocity"), Slot("average gradient")
_SQUARE = Slot("average square", is_non_negative=True)


@dataclass(frozen=True)
class RMSProp(RowOptimizerSpec):
    """s ← α s + (1 − α) d²;  w ← w − lr · d / (√s + eps), with d = g + weight_decay · w.

    With ``momentum``: v ← momentum · v + d / (√s + eps);  w ← w − lr · v. ``centered``: a ← α a + (1 − α) d, and √(s −
    a²) in place of √s. This is ``torch.optim.RMSprop`` (Tieleman and Hinton, "Neural networks for machine learning",
    lecture 6.5, 2012) on a table all of whose rows are pushed each step; a row outside a push neither moves nor decays.
    Memory: one slot of float32 per row, one more with ``momentum``, and one ``centered``. A push that carries s beyond
    the range of float32 is refused like any other overflow.
    """

    lr: float = 1e-2
    """Learning rate; a push may carry another one."""
    alpha: float = 0.99
    """Decay of the averages, in [0, 1)."""
    eps: float = 1e-8
    """Added to the root; at least 1.2e-38, so that a zero gradient is not divided by zero."""
    weight_decay: float = 0.0
    """L2 coefficient λ added to the gradient as λ·w."""
    momentum: float = 0.0
    """Decay of the velocity, in [0, 1)."""
    centered: bool = False
    """Divide by the standard deviation of the gradients."""

    name: ClassVar[str] = "rmsprop"
    state: ClassVar[str] = "averages"
    takes_narrow_slots: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_rate("lr", self.lr)
        require_rate("weight_decay", self.weight_decay)
        require_divisor("eps", self.eps)
        real_number("alpha", self.alpha)
        require(0 <= self.alpha < 1, f"alpha is {self.alpha!r}; it must lie in [0, 1)")
        require_momentum(self.momentum)
        require(self.centered in (False, True), f"centered is {self.centered!r}; it must be True or False")

    @property
    def slots(self) -> tuple[Slot, ...]:  # type: ignore[override]
        velocity, average = (_VELOCITY,) * (self.momentum != 0), (_AVERAGE,) * self.centered
        return (*velocity, *average, _SQUARE)

    @property
    def fixed(self) -> Mapping[str, str]:
        return {
            "momentum": "whether a row keeps a velocity depends on it",
            "centered": "whether a row keeps its average gradient depends on it",
        }
