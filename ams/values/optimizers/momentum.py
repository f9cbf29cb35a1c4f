"""SGD, momentum for tables whose rows are all pushed each step, and sparse momentum for other tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from geartrain.ams.values.arguments import real_number
from geartrain.ams.values.optimizers.spec import Drift, RowOptimizerSpec, Slot, flag, require, require_rate

Untouched = Literal["freeze", "elapsed"]


def require_momentum(momentum: float) -> None:
    """Raise InvalidArgument unless ``momentum`` lies in [0, 1)."""
    real_number("momentum", momentum)
    require(0 <= momentum < 1, f"momentum is {momentum!r}; it must lie in [0, 1)")


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


@dataclass(frozen=True)
class SparseMomentum(RowOptimizerSpec):
    """Momentum on the rows of a push: v ← momentum · v + g + weight_decay · w;  w ← w − lr · v (PLSC, section 4).

    ``untouched="freeze"`` is the lazy form: a row outside the push neither moves nor decays.

    ``untouched="elapsed"`` equals dense momentum: at every push each row of the table, even one that was never written,
    decays and moves on by its momentum. It is caught up at its next pull or push, from its last step and the learning
    rates since then, so that a step costs only its own rows. Memory: 8 more bytes per row, for its last step, and 4 per
    remembered step (at most about 20,000 per table and shard; no gradient buffer, no pass over all rows). Traffic:
    every push goes to every shard, empty where it has no rows, to count as a step there. A row that would overflow its
    type stays at the largest value.
    """

    lr: float
    """Learning rate; a push may carry another one."""
    momentum: float = 0.9
    """Decay μ of the velocity, in [0, 1)."""
    weight_decay: float = 0.0
    """L2 coefficient λ added to the gradient as λ·w."""
    untouched: Untouched = "freeze"
    """Treatment of rows outside a push."""

    name: ClassVar[str] = "sparse_momentum"
    slots: ClassVar[tuple[Slot, ...]] = (Slot("momentum"),)
    state: ClassVar[str] = "momentum"
    saves_gradient_buffer: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_rate("lr", self.lr)
        require_rate("weight_decay", self.weight_decay)
        require_momentum(self.momentum)
        require(
            self.untouched in ("freeze", "elapsed"),
            f"untouched is {self.untouched!r}; it must be 'freeze' or 'elapsed'",
        )

    @property
    def fixed(self) -> Mapping[str, str]:
        fixed = {"untouched": "the table counts its steps, or does not, from its first"}
        if self.untouched == "elapsed":
            reason = "untouched='elapsed' moves rows later, by the numbers of the table, for all the steps they missed"
            fixed |= dict.fromkeys(("momentum", "weight_decay"), reason)
        return fixed

    @property
    def fixed_scalars(self) -> Mapping[str, str]:
        return {"elapsed" if name == "untouched" else name: reason for name, reason in self.fixed.items()}

    @property
    def drift(self) -> Drift | None:
        return Drift(self.momentum, self.weight_decay) if self.untouched == "elapsed" else None

    def scalars(self) -> dict[str, float]:
        numbers = {name: float(getattr(self, name)) for name in ("lr", "momentum", "weight_decay")}
        return {**numbers, "elapsed": float(self.untouched == "elapsed")}

    @classmethod
    def from_scalars(cls, scalars: Mapping[str, float]) -> Self:
        rest = dict(scalars)
        return cls(untouched="elapsed" if flag("elapsed", rest.pop("elapsed", 0)) else "freeze", **rest)
