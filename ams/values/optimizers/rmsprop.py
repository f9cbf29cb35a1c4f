"""RMSProp: gradients by the root of their average square."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from geartrain.ams.values.arguments import real_number
from geartrain.ams.values.optimizers.momentum import require_momentum
from geartrain.ams.values.optimizers.spec import (
    Floats,
    RowOptimizerSpec,
    Slot,
    UpdateStep,
    flag,
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
    """Added to the root; at least 1.2e-38, so that a zero gradient divides by no zero."""
    weight_decay: float = 0.0
    """L2 coefficient λ added to the gradient as λ·w."""
    momentum: float = 0.0
    """Decay of the velocity, in [0, 1)."""
    centered: bool = False
    """Divide by the deviation of the gradients from their average."""

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

    @classmethod
    def from_scalars(cls, scalars: Mapping[str, float]) -> Self:
        rest = dict(scalars)
        return cls(centered=flag("centered", rest.pop("centered", 0)), **rest)

    def updated(self, row: Floats, slots: Floats, gradient: Floats, push: UpdateStep) -> tuple[Floats, Floats]:
        dtype, w = push.dtype, row.astype(push.dtype)
        state = np.split(slots.astype(dtype), len(self.slots), axis=-1)
        alpha, rest = dtype(self.alpha), dtype(1 - self.alpha)
        direction = gradient.astype(dtype) * dtype(push.scale) + dtype(self.weight_decay) * w
        variance = state[-1] = alpha * state[-1] + rest * direction * direction
        if self.centered:
            state[-2] = alpha * state[-2] + rest * direction
            variance = np.maximum(variance - state[-2] * state[-2], dtype(0))
        step = direction / (np.sqrt(variance) + dtype(self.eps))
        if self.momentum:
            step = state[0] = dtype(self.momentum) * state[0] + step
        return w - dtype(push.lr) * step, np.concatenate(state, axis=-1)
