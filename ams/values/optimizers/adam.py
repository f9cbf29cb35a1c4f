"""Adam with an update count per row, with decoupled weight decay, and with one second moment per row."""

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
    """Added to the root of the second moment; at least 1.2e-38, so that a zero gradient is not divided by zero."""
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


@dataclass(frozen=True)
class AdamW(Adam):
    """w ← (1 − lr · weight_decay) · w, then :class:`Adam` with d = g.

    On a table all of whose rows are pushed each step this is ``torch.optim.AdamW`` (Loshchilov and Hutter, "Decoupled
    weight decay regularization", ICLR 2019, algorithm 2); a row outside a push neither moves nor decays. Memory and
    range as with Adam.
    """

    weight_decay: float = 1e-2
    """Fraction of a row that an update with a learning rate of 1 subtracts."""

    name: ClassVar[str] = "adamw"


@dataclass(frozen=True)
class RowWiseAdam(AdamW):
    """m ← β₁ m + (1 − β₁) g;  v ← β₂ v + (1 − β₂) mean(g²);  w ← (1 − lr · weight_decay) · w − lr · m̂ / (√v̂ + eps).

    The mean is over the row, so that v is one number: ``partial_rowwise_adam`` of FBGEMM. m̂ = m / (1 − β₁ᵗ) and v̂ =
    v / (1 − β₂ᵗ), where t is the row's own number of updates (FBGEMM's is the table's). A row of width 1 is updated as
    by :class:`AdamW`. Memory: one slot of float32 and 12 bytes per row. Range as with ``RowWiseAdagrad``.
    """

    weight_decay: float = 0.0
    """Fraction of a row that an update with a learning rate of 1 subtracts, apart from the gradient."""

    name: ClassVar[str] = "rowwise_adam"
    slots: ClassVar[tuple[Slot, ...]] = (
        Slot("first moment"),
        Slot("second moment", is_non_negative=True, per_row=True),
    )
