"""Adagrad with an update count per row, and its form with one accumulator per row, which needs nearly no memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from geartrain.ams.values.optimizers.spec import (
    RowOptimizerSpec,
    Slot,
    require_divisor,
    require_rate,
)


@dataclass(frozen=True)
class Adagrad(RowOptimizerSpec):
    """s ← s + d²;  w ← w − lr / (1 + (t − 1) · lr_decay) · d / (√s + eps), with d = g + weight_decay · w.

    s begins at ``initial_accumulator_value``, and t is the row's own number of updates: on a table all of whose rows
    are pushed each step this is ``torch.optim.Adagrad`` (Duchi, Hazan and Singer, JMLR 2011, with diagonal matrices),
    and a row outside a push neither moves nor decays. Memory: one slot of float32 per row, and 8 bytes with
    ``lr_decay``. The slot holds s without the value that it begins at. A push that carries s beyond the range of
    float32 is refused like any other overflow.
    """

    lr: float = 1e-2
    """Learning rate; a push may carry another one."""
    lr_decay: float = 0.0
    """Decay of a row's learning rate with its number of updates."""
    weight_decay: float = 0.0
    """L2 coefficient λ added to the gradient as λ·w."""
    initial_accumulator_value: float = 0.0
    """Initial value of the sum of squares."""
    eps: float = 1e-10
    """Added to the root of the sum; at least 1.2e-38, so that a zero gradient is not divided by zero."""

    name: ClassVar[str] = "adagrad"
    slots: ClassVar[tuple[Slot, ...]] = (Slot("sum of squares", is_non_negative=True),)
    state: ClassVar[str] = "sum of squares"
    takes_narrow_slots: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("lr", "lr_decay", "weight_decay", "initial_accumulator_value"):
            require_rate(name, getattr(self, name))
        require_divisor("eps", self.eps)

    @property
    def fixed(self) -> Mapping[str, str]:
        return {
            "lr_decay": "whether a row's updates are counted depends on it",
            "initial_accumulator_value": "the sums of squares so far began at it",
        }

    @property
    def counts_updates(self) -> bool:
        return self.lr_decay != 0


@dataclass(frozen=True)
class RowWiseAdagrad(Adagrad):
    """s ← s + mean(d²);  w ← w − lr / (1 + (t − 1) · lr_decay) · d / (√s + eps), with d = g + weight_decay · w.

    The mean is over the row, so that s is one number: ``rowwise_adagrad`` of FBGEMM (with its weight decay of mode L2)
    and ``torchrec.optim.RowWiseAdagrad``. s begins at ``initial_accumulator_value``, and t is the row's own number of
    updates. A row of width 1 is updated as by :class:`Adagrad`. Memory: 4 bytes per row, and 8 with ``lr_decay``. A
    push that carries a sum of a row's squares beyond the range of float32 is refused like any other overflow.
    """

    name: ClassVar[str] = "rowwise_adagrad"
    slots: ClassVar[tuple[Slot, ...]] = (Slot("sum of mean squares", is_non_negative=True, per_row=True),)
    state: ClassVar[str] = "sum of mean squares"
