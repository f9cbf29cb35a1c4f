"""Interface between a group of embeddings and the storage of its rows."""

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

_NAMED = 3
"""Most tables that a name lists."""


@dataclass(frozen=True, kw_only=True)
class GroupSettings:
    """Settings of a group."""

    cluster: Cluster | None
    name: str
    fields: Sequence[Field]
    """All fields of the group."""
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
    """Storage of a group's rows. For a kind of your own put a subclass into ``GROUP_ROWS``."""

    summary: ClassVar[str]
    """Short description, for the error about an unknown name."""
    parts: Sequence[TrainedTables[Any]]
    """The tables, grouped by optimizer."""
    specs: dict[str, TableSpec]
    """Specs of the tables by :attr:`Field.table_name`."""
    write_logs: list[WriteLog]
    """Logs of the rows that this process writes to clusters."""
    pushes_rows_alone = False
    """Whether a step sends only pushes of rows, which may go in the background."""
    is_bounded = False
    """Whether a look-up must see the pushes of other workers up to its step."""
    worker_steps: JobSteps | None = None
    """Steps of this worker and of the others, if they wait for one another."""

    @abstractmethod
    def __init__(self, settings: GroupSettings) -> None:
        """Create or open the tables."""

    @abstractmethod
    def table(self, name: str) -> Any:
        """Return the table of this :attr:`Field.table_name`."""

    @abstractmethod
    def merged(self, batch: Any) -> Any:
        """Return the merged ids of a batch. Any thread may call it.

        The result's ``given`` holds the ids of all fields as in the batch, or None if vectors need no shaping.
        """

    @abstractmethod
    def pull(self, merged: Any) -> None:
        """Read the rows that :meth:`vectors` needs here."""

    @abstractmethod
    def vectors(self, merged: Any, device: torch.device) -> Sequence[Tensor]:
        """Return the vectors, float32 [V, D], of the fields with rows, in their order; gradients go to the rows."""

    def join(self) -> None:  # noqa: B027
        """Join the workers that wait for one another, before the first look-up of training."""

    def move_to(self, device: torch.device) -> None:  # noqa: B027
        """Follow the module to a device."""

    def cache_report(self) -> dict[str, dict[str, Any]]:
        """Return the counters of every table's cache."""
        return {}


def by_optimizer(specs: Mapping[str, TableSpec]) -> list[list[str]]:
    """Return the tables of each optimizer, in order of first appearance."""
    found: dict[RowOptimizerSpec, list[str]] = {}
    for table, spec in specs.items():
        found.setdefault(spec.optimizer, []).append(table)
    return list(found.values())


def name_of(specs: Sequence[TableSpec]) -> str:
    """Return the name of several tables in errors and param_groups, the same wherever the rows are."""
    names = [spec.name for spec in specs]
    return ", ".join(names) if len(names) <= _NAMED else f"{names[0]} … {names[-1]} ({len(names)} tables)"


U = TypeVar("U", bound=PendingUpdate[Any])


class TrainedTables(ModuleWithRows, Generic[U]):
    """A :class:`~geartrain.bridge.rows.pending.RowModule` of several tables with one optimizer."""

    def __init__(self, update: U, placement: Placement) -> None:
        """``update`` and ``placement`` are of the same tables."""
        super().__init__()
        self.row_update = update
        self.register_stand_in(update)
        self.row_placement = placement
        self._specs = placement.specs()
        self.recent: Sequence[Ids] = [np.empty(0, np.int64) for _ in self._specs]
        """Ids of the last training batch for each table: their rows have certainly moved."""

    def get_extra_state(self) -> dict[str, Any]:
        """Return names, step and identity of the rows, which are in snapshots. Costs one small pull of all tables."""
        self.row_update.flush()
        rows = self.row_placement.identities(self.recent)
        named = {spec.name: {"dim": spec.dim, "rows": own} for spec, own in zip(self._specs, rows, strict=True)}
        return {"step": self.row_update.step, "tables": named}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        """Raise SpecMismatch if the state was saved with other rows than these, whatever ``strict``."""
        state = state_dict.get(f"{prefix}_extra_state")
        if isinstance(state, Mapping):
            self._require_tables(state)
            named = {name: item["rows"] for name, item in state["tables"].items()}
            self.row_placement.require_same(named, int(state["step"]))
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Continue at the saved step. Raises SpecMismatch for other tables."""
        self._require_tables(state)
        self.row_update.resume_at(int(state["step"]))

    def _require_tables(self, state: Mapping[str, Any]) -> None:
        mine = {spec.name: spec.dim for spec in self._specs}
        saved = {name: item["dim"] for name, item in state["tables"].items()}
        if mine != saved:
            raise SpecMismatch(
                f"the saved embeddings have tables and dims {saved}, these {mine}; create them with the saved fields"
            )

    def extra_repr(self) -> str:
        """Return the tables, for print()."""
        return self.row_update.name
