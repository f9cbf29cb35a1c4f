"""Adagrad and Adam with one number a row for the size of its gradients: nearly no memory beside wide rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from geartrain.ams.values.optimizers.adagrad import Adagrad
from geartrain.ams.values.optimizers.adamw import AdamW
from geartrain.ams.values.optimizers.spec import Slot


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


@dataclass(frozen=True)
class RowWiseAdam(AdamW):
    """m ← β₁ m + (1 − β₁) g;  v ← β₂ v + (1 − β₂) mean(g²);  w ← (1 − lr · weight_decay) · w − lr · m̂ / (√v̂ + eps).

    The mean is over the row, so that v is one number: ``partial_rowwise_adam`` of FBGEMM. m̂ = m / (1 − β₁ᵗ) and v̂ =
    v / (1 − β₂ᵗ), where t is the row's own number of updates (FBGEMM's is the table's). A row of width 1 is updated as
    by :class:`AdamW`. Memory: one slot of float32 and 12 bytes per row. Range as with :class:`RowWiseAdagrad`.
    """

    weight_decay: float = 0.0
    """Part of a row that an update with a learning rate of 1 takes away, apart from the gradient."""

    name: ClassVar[str] = "rowwise_adam"
    slots: ClassVar[tuple[Slot, ...]] = (
        Slot("first moment"),
        Slot("second moment", is_non_negative=True, per_row=True),
    )
