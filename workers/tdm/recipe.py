"""Settings of the training of a tree of items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from geartrain.workers.ctr.recipe import EmbeddingRecipe

CUTS = (10, 50)
"""List lengths at which recall is measured."""


@dataclass(frozen=True, kw_only=True)
class TdmRecipe(EmbeddingRecipe):
    """Recipe of a tree of items; ``history`` is the number of the user's latest clicked items, ``steps`` that of each
    tree.
    """

    dim: int = 24
    history: int = 50
    negatives: int = 4
    """Other nodes of each level for each clicked item."""
    beam: int = 100
    """Nodes of a level that the search keeps."""
    batch_size: int = 250
    steps: int = 400
    rebuilds: int = 1
    """Number of times the tree is rebuilt from what was learned."""
    row_lr: float = 0.005
    row_weight_decay: float = 0.0001
    lr: float = 0.002
    least: ClassVar[Mapping[str, int]] = {
        **EmbeddingRecipe.least,
        "history": 1,
        "negatives": 1,
        "rebuilds": 0,
        "beam": max(CUTS),
    }

    def stage_steps(self) -> int:
        """Return the updates of one stage, with all its trees."""
        return self.steps * (1 + self.rebuilds)
