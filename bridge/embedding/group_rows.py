"""What a group of embeddings asks of its rows, wherever they lie."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from geartrain.ams.values.errors import SpecMismatch
from geartrain.ams.values.optimizers.registry import RowOptimizerSpec
from geartrain.ams.values.specs import Ids, TableSpec
from geartrain.bridge.embedding.field import Field
from geartrain.bridge.embedding.modes import Mode
from geartrain.bridge.placements.placement import Placement
from geartrain.bridge.rows.pending import PendingUpdate
from geartrain.bridge.rows.stand_in import ModuleWithRows

if TYPE_CHECKING:
    from geartrain.ams.client.cluster import Cluster
    from geartrain.ams.client.jobs.worker_steps import JobSteps
    from geartrain.ams.client.rows.write_log import WriteLog


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """What a group was made of."""

    cluster: Cluster | None
    name: str
    fields: Sequence[Field]
    """All of them."""
    names: Mapping[str, str]
    """Names of the tables, by :attr:`Field.table_name`."""
    optimizer: RowOptimizerSpec | None
    seed: int
    reuse: bool
    mode: Mode
    process_group: dist.ProcessGroup | None
    device_cache_bytes: int

    @property
    def with_rows(self) -> list[int]:
        """Numbers of the fields that have rows."""
        return [number for number, field in enumerate(self.fields) if field.features is None]


class GroupRows(ABC):
    """The rows of a group in one place. A way of one's own is a subclass in ``GROUP_ROWS``."""

    summary: ClassVar[str]
    """For whoever gave a name that is none."""
    parts: Sequence[TrainedTables[Any]]
    """The tables of one optimizer together."""
    specs: dict[str, TableSpec]
    """By :attr:`Field.table_name`."""
    write_logs: list[WriteLog]
    """Which rows of clusters this process writes."""
    pushes_rows_alone = False
    """Whether a step sends nothing but pushes of rows, which may be sent in the background."""
    is_bounded = False
    """Whether the look-up of a step must see what others have pushed by then."""
    worker_steps: JobSteps | None = None
    """How far this worker is among others that wait for one another."""

    @abstractmethod
    def __init__(self, settings: GroupSettings) -> None:
        """Make or open the tables."""

    @abstractmethod
    def table(self, name: str) -> Any:
        """The table of this :attr:`Field.table_name`."""

    @abstractmethod
    def merged(self, batch: Any) -> Any:
        """The ids of a batch. ``given`` of it are those of all fields as the batch had them, or None where each field's
        vectors are to be as they come. Any thread may call it."""

    @abstractmethod
    def pull(self, merged: Any) -> None:
        """Read rows that have to be here before :meth:`vectors`."""

    @abstractmethod
    def vectors(self, merged: Any, device: torch.device) -> Sequence[Tensor]:
        """The vectors [V, D] of the fields that have rows, in their order, float32; gradients go to the rows."""

    def join(self) -> None:  # noqa: B027
        """Rows are about to be looked up to be trained: others that wait for one another wait for this worker."""

    def move_to(self, device: torch.device) -> None:  # noqa: B027
        """The module goes to a device."""

    def cache_report(self) -> dict[str, dict[str, Any]]:
        """Of each table with a cache, what came of it."""
        return {}


def by_optimizer(specs: Mapping[str, TableSpec]) -> list[list[str]]:
    """The tables of each optimizer, in order of first appearance."""
    found: dict[RowOptimizerSpec, list[str]] = {}
    for table, spec in specs.items():
        found.setdefault(spec.optimizer, []).append(table)
    return list(found.values())


U = TypeVar("U", bound=PendingUpdate[Any])


class TrainedTables(ModuleWithRows, Generic[U]):
    """A :class:`~geartrain.bridge.rows.pending.RowModule` of several tables with one optimizer."""

    def __init__(self, update: U, placement: Placement) -> None:
        """Both of the same tables."""
        super().__init__()
        self.row_update = update
        self.register_stand_in(update)
        self.row_placement = placement
        self._specs = placement.specs()
        self.recent: Sequence[Ids] = [np.empty(0, np.int64) for _ in self._specs]
        """Of each table the ids of the last batch that trains, whose rows have certainly moved."""

    def get_extra_state(self) -> dict[str, Any]:
        """Names, step, and what tells the rows from others, which are in snapshots. One small pull of all tables."""
        self.row_update.flush()
        rows = self.row_placement.identities(self.recent)
        named = {spec.name: {"dim": spec.dim, "rows": own} for spec, own in zip(self._specs, rows, strict=True)}
        return {"step": self.row_update.step, "tables": named}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        """Raises SpecMismatch if it was saved with other rows than are here, whatever ``strict``."""
        state = state_dict.get(f"{prefix}_extra_state")
        if isinstance(state, Mapping):
            self._require_tables(state)
            named = {name: item["rows"] for name, item in state["tables"].items()}
            self.row_placement.require_same(named, int(state["step"]))
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Go on at the saved step. Raises SpecMismatch for other tables."""
        self._require_tables(state)
        self.row_update.go_on_at(int(state["step"]))

    def _require_tables(self, state: Mapping[str, Any]) -> None:
        mine = {spec.name: spec.dim for spec in self._specs}
        saved = {name: item["dim"] for name, item in state["tables"].items()}
        if mine != saved:
            raise SpecMismatch(
                f"the saved embeddings have tables and dims {saved}, these {mine}; create them with the saved fields"
            )

    def extra_repr(self) -> str:
        """The tables, for print()."""
        return self.row_update.name
