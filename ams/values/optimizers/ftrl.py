"""FTRL-Proximal: a learning rate per weight, and weights that are exactly zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from geartrain.ams.values.optimizers.spec import (
    RowOptimizerSpec,
    Slot,
    require_divisor,
    require_rate,
)

SMALLEST_RATE = 2.0**-126
"""Learning rate in place of 0 where a weight of 0 is divided by it."""


@dataclass(frozen=True)
class FTRL(RowOptimizerSpec):
    """FTRL-Proximal (McMahan et al., "Ad click prediction: a view from the trenches", KDD 2013, algorithm 1).

    n ← n + g²;  z ← z + g − (1/η′ − 1/η) · w, where η = lr / (beta + √n) before and η′ after;  w ← 0 if |z| ≤ l1, else
    −(z − sign(z) · l1) / (1/η′ + l2). Each number of a row has its own z and n. ``l1`` makes those exactly 0 whose
    gradients are too small.

    *Initial value of a row.* The paper starts at w = 0. Here a row starts at its initial (or assigned) value w₀, as if
    z were −w₀/η: the first update is a gradient step from w₀, drawn to 0 by l1 and l2. A row without an update reads as
    w₀. With ``gt.Constant(0)`` rows start as in the paper.

    *A changing learning rate* (lr with a push, a schedule) is the η′ of its push, and no weight jumps: with 0 nothing
    moves. For that the slot of z holds z + w/η, which is −(l2 · w + l1 · sign(w)) beside a weight that is not 0, and
    lies within l1 of 0 beside one that is; the rest of z follows from the weight. Both slots start at 0.

    A row outside a push neither moves nor decays. Memory: two slots of float32. A push that carries n beyond the range
    of float32 is refused like any other overflow.
    """

    lr: float = 0.1
    """α of the paper: the learning rate; a push may carry another one."""
    beta: float = 1.0
    """β of the paper: scale of the gradients that lower the rate; at least 1.2e-38."""
    l1: float = 0.0
    """λ₁: strength of the L1 penalty, which holds weights at exactly 0."""
    l2: float = 0.0
    """λ₂: strength of the L2 penalty, which draws weights to 0."""

    name: ClassVar[str] = "ftrl"
    slots: ClassVar[tuple[Slot, ...]] = (Slot("z"), Slot("n", is_non_negative=True))
    state: ClassVar[str] = "z and n"
    takes_narrow_slots: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("lr", "l1", "l2"):
            require_rate(name, getattr(self, name))
        require_divisor("beta", self.beta)
