"""Row backends of a class head: interface to the rows and all computation on them.

Legend: B samples, C classes, D width, k answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor, nn

from geartrain.ams.programs.class_lifecycle import LiveClasses
from geartrain.ams.programs.selection import Selection
from geartrain.ams.storage.snapshot.folder import Snapshot
from geartrain.ams.storage.snapshot.store import Place
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.specs import Initializer
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.head.backends.memory_plan import MemoryPart, MemoryPlan
from geartrain.bridge.head.loss.autograd_node import HeadCall
from geartrain.bridge.head.loss.config import HeadConfig
from geartrain.bridge.head.loss.feature_parts import FeatureParts
from geartrain.bridge.head.loss.margins.head_margin import HeadMargin
from geartrain.bridge.head.loss.margins.margin import AnyMargin
from geartrain.bridge.head.selection.graph_build import GraphSource
from geartrain.bridge.rows.pending import PendingUpdate
from geartrain.bridge.rows.tables import ReadableTable

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

    from geartrain.ams.client.cluster import Cluster

T = TypeVar("T")


@dataclass(frozen=True)
class Imprinted:
    """Record of a head whose centers were imprinted: the step, and the direction removed from them; part of its
    state."""

    step: int
    shared_D: Tensor | None
    """Direction that the means shared, float64; None: none."""

    def state(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return {"step": self.step, "shared": None if self.shared_D is None else self.shared_D.tolist()}

    @staticmethod
    def of(state: Mapping[str, Any] | None) -> Imprinted | None:
        """Return the record of a :meth:`state`."""
        if state is None:
            return None
        shared = state["shared"]
        return Imprinted(
            state["step"], None if shared is None else torch.tensor(shared, dtype=torch.float64, device="cpu")
        )


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """Settings of a head; a backend uses those that concern it."""

    name: str
    num_classes: int
    num_live_classes: int | None
    """Classes that live from the start; None: all."""
    dim: int
    """Width of features."""
    bias: bool
    """Whether rows have one more column."""
    sub_centers: int
    """Centers of a class, one after the other in its row."""
    select: Selection
    margin: AnyMargin | None
    optimizer: RowOptimizerSpec
    initializer: Initializer
    cluster: Cluster | None
    reuse: bool
    sync: bool
    config: HeadConfig

    @property
    def width(self) -> int:
        """Width of a row."""
        return self.dim * self.sub_centers + self.bias

    def table(self) -> dict[str, Any]:
        """Arguments of a table, or of its spec, beside the name."""
        return {
            "dim": self.width,
            "optimizer": self.optimizer,
            "num_rows": self.num_classes,
            "initializer": self.initializer,
            "seed": self.config.seed,
            "dtype": self.config.dtype,
            "slot_dtype": self.config.slot_dtype,
        }


def require_no_wire(settings: HeadSettings, instead: str) -> None:
    """Raise InvalidArgument if a wire dtype is given for rows that are not sent; ``instead``: what is sent."""
    if settings.config.wire_dtype is not None:
        raise InvalidArgument(
            f"wire_dtype is {settings.config.wire_dtype!r}, and of head {settings.name!r} no rows travel: {instead}. "
            "Leave it out, or use rows='pull'"
        )


class LocalRows(Protocol):
    """Operations of rows held by the training processes; every rank takes part in each."""

    @property
    def own_classes(self) -> range:
        """Classes whose rows this process holds."""

    def start_parts(
        self, parts: FeatureParts, labels: Tensor, weight: Tensor | None, *, in_training: bool, want_rows: bool
    ) -> HeadCall:
        """Do :meth:`RowBackend.start` for features that ``parts`` compute; ``parts`` learn where their gradients will
        be."""

    def require_step(self, step: int) -> None:
        """Raise SpecMismatch if the rows are known to be of another step than a state about to be loaded."""

    def move_with(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Follow ``module.to(device)``, which applies ``fn`` to each tensor."""

    def snapshot(
        self, root: str | Path, name: str | None, *, step: int, values: Mapping[str, Any], files: Mapping[str, bytes]
    ) -> Place:
        """Write a snapshot, as ``ClassHead.snapshot``."""

    def restore(self, path: str | Path) -> Snapshot:
        """Read a snapshot, as ``ClassHead.restore``."""

    def sharded_rows(self, head: nn.Module) -> Stateful:
        """Return the rows for DCP, as ``ClassHead.sharded_rows``."""


class RowBackend(Protocol):
    """Rows of one head and the computation on them; ``ROW_BACKENDS`` of ``registry.py`` names the kinds."""

    summary: ClassVar[str]
    """Short description, for error messages."""
    needs_cluster: ClassVar[bool]
    """Whether its rows are in a cluster."""

    def __init__(self, settings: HeadSettings) -> None:
        """Create the table, or open it. Raises TableExists, SpecMismatch, InvalidArgument."""

    @classmethod
    def step_memory(cls, plan: MemoryPlan) -> list[MemoryPart]:
        """Return the memory of such rows beside the table, by part."""

    # Place of the rows, and the ranks that train them.

    settings: HeadSettings

    @property
    def table(self) -> ReadableTable:
        """Table of the rows."""

    @property
    def peers(self) -> Communicator | None:
        """Ranks that train the rows together."""

    @property
    def local(self) -> LocalRows | None:
        """Operations of rows that this process and its peers hold and read together; None: the rows are elsewhere."""

    def identity(self) -> dict[str, Any] | None:
        """Return the identity of the rows (see :mod:`~geartrain.bridge.rows.row_identity`); None: no state needs it."""

    def require_rows(self, identity: Mapping[str, Any] | None) -> None:
        """Raise SpecMismatch unless the rows, for which a state_dict is about to be loaded, have this
        :meth:`identity`."""

    # State of a step, and the step itself.

    live_classes: LiveClasses
    """Classes that are not retired."""
    margins: HeadMargin
    """Margin with its learned state."""
    imprinted: Imprinted | None
    """Record of imprinted centers; None: most centers were not imprinted."""

    @property
    def select(self) -> Selection:
        """Selection of the active classes, bound to these rows."""

    @property
    def update(self) -> PendingUpdate[Any]:
        """Pending row gradients."""

    def graph_source(self) -> GraphSource:
        """Return the rows for the graphs of a selection. Collective."""

    def start(
        self, features: Tensor, labels: Tensor, weight: Tensor | None, *, in_training: bool, want_rows: bool
    ) -> HeadCall:
        """Check a batch, choose its active classes, and pull their rows or start the work at their place.

        ``weight`` is the weight of each sample (None: 1), ``in_training`` the head's mode, ``want_rows`` whether row
        gradients will follow.
        """

    def predict(self, features: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return scores [B, k] and ids [B, k] of the best classes."""
