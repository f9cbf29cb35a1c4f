"""What an optimizer of rows on ranks is given.

Legend: N rows of a call, D width, S numbers of a row's slots.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class RowStep:
    """One update of distinct rows. Rows and slots are changed in place, the gradient may be overwritten."""

    rows_ND: Tensor
    slots_ND: Tensor | None
    """[N, S], one slot after the other; None where there are none."""
    gradient_ND: Tensor
    lr: float
    updates_N: Tensor | None
    """Number of each row's update, from 1; None where nothing counts them."""

    @property
    def slots(self) -> Tensor:
        """[N, S]."""
        assert self.slots_ND is not None
        return self.slots_ND

    @property
    def t(self) -> Tensor:
        """Number of each row's update, float64 [N, 1]."""
        assert self.updates_N is not None
        return self.updates_N.double().unsqueeze(1)

    def decay_gradient(self, weight_decay: float) -> Tensor:
        """Add ``weight_decay`` · rows to the gradient, and return it."""
        return self.gradient_ND.add_(self.rows_ND, alpha=weight_decay) if weight_decay else self.gradient_ND
