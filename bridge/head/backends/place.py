"""Where the class rows of a head are worked on: one object per place, which a head asks for everything of its rows.

Legend: B samples, D width, k answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from geartrain.ams.programs.class_lifecycle import LivingClasses
from geartrain.ams.programs.selection import FullSoftmax, PartialFC
from geartrain.ams.values.arguments import integer
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.specs import DTypeName, Initializer
from geartrain.bridge.head.backends.ranks.link import RankLink
from geartrain.bridge.head.head_loss import HeadCall
from geartrain.bridge.head.loss.margins import CombinedMargin
from geartrain.bridge.head.selection.knn_selection import KNNSelection, KNNSoftmax
from geartrain.bridge.rows.ranks import Ranks
from geartrain.bridge.rows.row_update import PendingUpdate
from geartrain.bridge.rows.tables import ReadableTable


def logits_bytes(rows: str, given: int | None) -> int:
    """``logits_cache_bytes``, or what is kept unless it is given: less where the active rows are held beside it."""
    if given is not None:
        return integer("logits_cache_bytes", given, 0)
    return (64 if rows == "ranks" else 26) << 20


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """What a head was made with, whatever the place of its rows."""

    name: str
    num_classes: int
    num_living: int | None
    """Classes that live from the start; None: all."""
    dim: int
    select: FullSoftmax | PartialFC | KNNSoftmax
    margin: CombinedMargin | None
    optimizer: RowOptimizerSpec
    dtype: DTypeName
    slot_dtype: DTypeName
    initializer: Initializer
    seed: int


class RowPlace(Protocol):
    """The rows of one head."""

    living: LivingClasses
    """The classes that are not retired; a step is over these."""
    margin: CombinedMargin | None
    """Of the next forward passes."""

    @property
    def table(self) -> ReadableTable:
        """The rows themselves."""
        ...

    @property
    def select(self) -> FullSoftmax | PartialFC | KNNSelection:
        """What chooses the active classes."""
        ...

    @property
    def update(self) -> PendingUpdate[Any]:
        """Row gradients that wait for the step."""
        ...

    @property
    def peers(self) -> Ranks | RankLink | None:
        """The ranks that train the rows together."""
        ...

    def identity(self) -> dict[str, Any] | None:
        """What tells the rows from others (:mod:`~geartrain.bridge.rows.same_rows`), where a state is to name it."""
        ...

    def begin(self, features: Tensor, labels: Tensor, *, in_training: bool, want_rows: bool) -> HeadCall:
        """Check a batch, choose its active classes, and pull their rows or go to where they are.

        ``in_training`` is the head's mode, ``want_rows`` whether row gradients will follow.
        """
        ...

    def predict(self, features: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Scores [B, k] and ids [B, k] of the best classes."""
        ...
