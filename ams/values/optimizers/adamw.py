"""Adam whose decay of the weights is apart from the gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from geartrain.ams.values.optimizers.adam import Adam


@dataclass(frozen=True)
class AdamW(Adam):
    """w ← (1 − lr · weight_decay) · w, then :class:`Adam` with d = g.

    On a table all of whose rows are pushed each step this is ``torch.optim.AdamW`` (Loshchilov and Hutter, "Decoupled
    weight decay regularization", ICLR 2019, algorithm 2); a row outside a push neither moves nor decays. Memory and
    range as with Adam.
    """

    weight_decay: float = 1e-2
    """Part of a row that an update with a learning rate of 1 takes away."""

    name: ClassVar[str] = "adamw"
