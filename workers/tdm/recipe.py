"""How a tree of items is trained: values only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.text import quoted
from geartrain.workers.ctr.samples.click_samples import SPLITS
from geartrain.workers.job.options import SnapshotSettings

CUTS = (10, 50)
"""Recall is measured among so many items."""


@dataclass(frozen=True, kw_only=True)
class TdmRecipe:
    """Settings of a training, all but where it runs."""

    split: str = "random"
    dim: int = 24
    """Width of embeddings."""
    hidden: tuple[int, ...] = (64, 32)
    dropout: float = 0.2
    history: int = 50
    """The latest so many clicked items of the user."""
    negatives: int = 4
    """Other nodes of each level for each clicked item."""
    beam: int = 100
    """Nodes of a level that the search keeps."""
    batch_size: int = 250
    steps: int = 400
    """With each tree."""
    rebuilds: int = 1
    """How often the tree is made anew by what was learned."""
    row_lr: float = 0.005
    """Peak learning rate of the rows, by Adam."""
    row_weight_decay: float = 0.0001
    """Of the rows that a step touches, added to their gradient."""
    lr: float = 0.002
    """Peak learning rate of the network, by Adam."""
    seed: int = 0
    snapshots: SnapshotSettings = field(default_factory=SnapshotSettings)

    def __post_init__(self) -> None:
        """Raises ConfigError that names the value."""
        if self.split not in SPLITS:
            raise ConfigError(f"split is {quoted(self.split)}; it must be one of {', '.join(SPLITS)}")
        least = {"dim": 2, "history": 1, "negatives": 1, "batch_size": 1, "steps": 1, "rebuilds": 0}
        for name, value in {**least, "beam": max(CUTS)}.items():
            if getattr(self, name) < value:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be at least {value}")
        for name in ("lr", "row_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be > 0")
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"seed is {self.seed!r}; it must lie in [0, 2^31)")

    def rate_factor(self, step: int, steps: int) -> float:
        """What both learning rates are multiplied by at ``step`` (from 0) of a stage of ``steps``: half a cosine over
        all its trees.
        """
        return 0.5 * (1 + math.cos(math.pi * step / steps))

    def stage_steps(self) -> int:
        """Updates of one stage: with all its trees."""
        return self.steps * (1 + self.rebuilds)
