"""The tables of an embedding module that one optimizer trains: a param_group, and a part of what is saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from geartrain.ams.values.errors import SpecMismatch
from geartrain.ams.values.specs import Ids, TableSpec
from geartrain.bridge.embedding.update import EmbeddingUpdate
from geartrain.bridge.rows.keeper import RowKeeper
from geartrain.bridge.rows.same_rows import LABELS, identities_of, require_same_rows

if TYPE_CHECKING:
    from geartrain.ams.client.cluster import Cluster
    from geartrain.ams.client.table import Table


class TrainedTables(nn.Module):
    """A :class:`~geartrain.bridge.rows.pending.RowModule` of several tables with one optimizer."""

    def __init__(self, cluster: Cluster, tables: Sequence[Table], update: EmbeddingUpdate) -> None:
        """``update`` is that of the tables."""
        super().__init__()
        self.row_update = update
        self.row_keeper: RowKeeper = _EmbeddingRows(cluster, update, tables)
        self._recent: list[Ids] = [np.empty(0, np.int64) for _ in tables]
        """Some ids of the last batch, whose rows have certainly moved."""

    def note(self, place: int, ids: Ids) -> None:
        """``ids`` are looked up to be trained."""
        self._recent[place] = ids[:LABELS]

    def get_extra_state(self) -> dict[str, Any]:
        """Names, step, and what tells the rows from others, which are in snapshots. One small pull of all tables."""
        self.row_update.flush()
        tables = self.row_update.tables
        rows = identities_of(tables, self._recent)
        named = {table.spec.name: {"dim": table.spec.dim, "rows": own} for table, own in zip(tables, rows, strict=True)}
        return {"step": self.row_update.step, "tables": named}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        """Raises SpecMismatch if it was saved with other rows than are here, whatever ``strict``."""
        state = state_dict.get(f"{prefix}_extra_state")
        if isinstance(state, Mapping):
            self._require_tables(state)
            for table in self.row_update.tables:
                require_same_rows(table, state["tables"][table.spec.name]["rows"])
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Go on at the saved step. Raises SpecMismatch for other tables."""
        self._require_tables(state)
        self.row_update.go_on_at(int(state["step"]))

    def _require_tables(self, state: Mapping[str, Any]) -> None:
        mine = {table.spec.name: table.spec.dim for table in self.row_update.tables}
        saved = {name: one["dim"] for name, one in state["tables"].items()}
        if mine != saved:
            raise SpecMismatch(
                f"the saved embeddings have tables and dims {saved}, these {mine}; create them with the saved fields"
            )

    def extra_repr(self) -> str:
        """The tables, for print()."""
        return self.row_update.name


class _EmbeddingRows(RowKeeper):
    def __init__(self, cluster: Cluster, update: EmbeddingUpdate, tables: Sequence[Table]) -> None:
        self.cluster = cluster
        self.peers = update.ranks
        self._update = update
        self._tables = tuple(tables)

    def specs(self) -> list[TableSpec]:
        return [table.spec for table in self._tables]

    def is_trained(self) -> bool:
        return any(max(table.versions()) > 0 for table in self._tables)

    def go_on(self) -> None:
        if self._update.ranks is not None:
            self._update.ranks.begin_anew()

    def adopt_states(self, states: Sequence[Mapping[str, Any]]) -> None:
        self._update.go_on_at(max((int(state["step"]) for state in states), default=0))
