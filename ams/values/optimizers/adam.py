"""Adam, each row by its own number of updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from geartrain.ams.values.arguments import real_number
from geartrain.ams.values.optimizers.spec import (
    RowOptimizerSpec,
    Slot,
    require,
    require_divisor,
    require_rate,
)


@dataclass(frozen=True)
class Adam(RowOptimizerSpec):
    """m ← β₁ m + (1 − β₁) d;  v ← β₂ v + (1 − β₂) d²;  w ← w − lr · m̂ / (√v̂ + eps), with d = g + weight_decay · w.

    m̂ = m / (1 − β₁ᵗ) and v̂ = v / (1 − β₂ᵗ), where t is the row's own number of updates: on a table all of whose rows
    are pushed each step this is ``torch.optim.Adam`` (Kingma and Ba, ICLR 2015, algorithm 1; weight decay as L2), and a
    row outside a push neither moves nor decays. Memory: two slots of float32 and 8 bytes per row. A push whose second
    moments would leave the range of float32 (gradients above about 5e20) is refused like any other overflow.
    """

    lr: float = 1e-3
    """Learning rate; a push may carry another one."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decays of the first and second moments, each in [0, 1)."""
    eps: float = 1e-8
    """Added to the root of the second moment; at least 1.2e-38, so that a zero gradient divides by no zero."""
    weight_decay: float = 0.0
    """L2 coefficient λ added to the gradient as λ·w."""

    name: ClassVar[str] = "adam"
    slots: ClassVar[tuple[Slot, ...]] = (Slot("first moment"), Slot("second moment", is_non_negative=True))
    state: ClassVar[str] = "moments"
    takes_narrow_slots: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_rate("lr", self.lr)
        require_rate("weight_decay", self.weight_decay)
        require_divisor("eps", self.eps)
        require(
            isinstance(self.betas, tuple | list) and len(self.betas) == 2,
            f"betas is {self.betas!r}; it must be a pair such as (0.9, 0.999)",
        )
        for beta in self.betas:
            real_number("a beta", beta)
            require(0 <= beta < 1, f"betas is {self.betas!r}; each must lie in [0, 1)")
        object.__setattr__(self, "betas", tuple(self.betas))  # JSON knows lists only

    @property
    def counts_updates(self) -> bool:
        return True

    def scalars(self) -> dict[str, float]:
        beta1, beta2 = map(float, self.betas)
        rest = {"lr": self.lr, "eps": self.eps, "weight_decay": self.weight_decay}
        return {"beta1": beta1, "beta2": beta2, **{name: float(value) for name, value in rest.items()}}

    @classmethod
    def from_scalars(cls, scalars: Mapping[str, float]) -> Self:
        rest = dict(scalars)
        return cls(betas=(rest.pop("beta1", 0.9), rest.pop("beta2", 0.999)), **rest)
