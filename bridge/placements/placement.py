"""Placement of a module's trained rows, as saving, loading and a state_dict use it.

Every module with rows has one: those in the tables of a cluster (pulled, or hosted: computed with by the shards) have a
:class:`ClusterPlacement`, those on the ranks' devices a ``DevicePlacement`` (``device_snapshot.py``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from geartrain.ams.values.errors import InternalError
from geartrain.ams.values.specs import Ids, TableSpec
from geartrain.bridge.collectives.communicator import Communicator
from geartrain.bridge.rows.ranks import SyncRanks
from geartrain.bridge.rows.row_identity import identities_of, require_same_rows

if TYPE_CHECKING:
    from geartrain.ams.client.cluster import Cluster
    from geartrain.ams.client.table import Table


class Placement(ABC):
    """The rows of one module, which returns this object as its property ``row_placement``."""

    cluster: Cluster | None = None
    """Cluster of the tables; None: this process and its peers hold them, and :meth:`snapshot` and :meth:`restore`
    them."""
    peers: Communicator | None = None
    """The ranks that train the rows together."""

    @abstractmethod
    def specs(self) -> list[TableSpec]:
        """Return the specs of the tables."""

    @abstractmethod
    def is_trained(self) -> bool:
        """Return whether the tables were written since they were created: loading would lose these rows."""

    def identities(self, recent: Sequence[Ids]) -> list[dict[str, Any]]:
        """Return the identity of each table's rows, as JSON values; ``recent`` are ids that were trained."""
        raise InternalError(f"the rows of {self.specs()} are known by snapshots alone, not by {recent}")

    def require_same(self, identities: Mapping[str, Any], step: int) -> None:
        """Raise SpecMismatch unless the rows are those of the :meth:`identities`, by table, and of ``step``."""
        raise InternalError(f"the rows of {self.specs()} are known by snapshots alone, not by {identities} of {step}")

    def require_loadable(self) -> None:  # noqa: B027
        """Raise InvalidArgument if the tables cannot be replaced beneath this module."""

    def require_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Raise SpecMismatch if the extra state of a saved module is of another kind than this one's."""

    def flush(self) -> None:  # noqa: B027
        """Flush pending values to the tables, before they are saved."""

    def resume(self) -> None:  # noqa: B027
        """Continue training with tables that were replaced. Every rank calls it."""

    def adopt_states(self, states: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027
        """Continue from the extra states of saved modules whose rows some of the tables received; others are new."""

    def graph_state(self) -> dict[str, Any] | None:
        """Return what was built from the rows and is worth saving, this rank's part of it; None: nothing."""
        return None

    def load_graph(self, state: Any, own: Callable[[Any, range], Tensor]) -> None:  # noqa: B027
        """Load the result of :meth:`graph_state`, or bytes of the format without parts; ``own`` reads some rows of a
        tensor in it."""

    def snapshot(self, root: Path, name: str) -> None:
        """Write the rows on the ranks as a snapshot. Every rank calls it."""
        raise InternalError(f"the rows for {name} in {root} are in a cluster, whose snapshots hold them")

    def restore(self, path: Path) -> None:
        """Read the rows on the ranks from a snapshot. Every rank calls it."""
        raise InternalError(f"the rows of {path} belong into a cluster, which restores them")


class ClusterPlacement(Placement):
    """Rows in tables of a cluster; ``peers`` push them together."""

    first_writes = 0
    """Number of writes of a table before any training."""

    def __init__(self, cluster: Cluster, tables: Sequence[Table], peers: SyncRanks | None) -> None:
        self.cluster, self.peers = cluster, peers
        self._tables = tuple(tables)
        self._ranks = peers

    def specs(self) -> list[TableSpec]:
        return [table.spec for table in self._tables]

    def is_trained(self) -> bool:
        return any(max(table.versions()) > self.first_writes for table in self._tables)

    def identities(self, recent: Sequence[Ids]) -> list[dict[str, Any]]:
        return identities_of(self._tables, recent)

    def require_same(self, identities: Mapping[str, Any], step: int) -> None:  # noqa: ARG002
        for table in self._tables:
            require_same_rows(table, identities[table.spec.name])

    def resume(self) -> None:
        if self._ranks is not None:
            self._ranks.restart()
