"""Where the trained rows of a module lie, and what saving, loading and a state_dict ask of them.

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
from geartrain.bridge.rows.same_rows import identities_of, require_same_rows

if TYPE_CHECKING:
    from geartrain.ams.client.cluster import Cluster
    from geartrain.ams.client.table import Table


class Placement(ABC):
    """The rows of one module, which says where they are by a property ``row_placement``."""

    cluster: Cluster | None = None
    """Where the tables are; None: in this process and its peers, who :meth:`snapshot` and :meth:`restore` them."""
    peers: Communicator | None = None
    """The ranks that train the rows together."""

    @abstractmethod
    def specs(self) -> list[TableSpec]:
        """The tables."""

    @abstractmethod
    def is_trained(self) -> bool:
        """Whether somebody has written to the tables since they were made: rows that loading would take away."""

    def identities(self, recent: Sequence[Ids]) -> list[dict[str, Any]]:
        """What tells the rows of each table from others, as JSON values; ``recent`` are ids that were trained."""
        raise InternalError(f"the rows of {self.specs()} are known by snapshots alone, not by {recent}")

    def require_same(self, identities: Mapping[str, Any], step: int) -> None:
        """Raise SpecMismatch unless the rows are those of the :meth:`identities`, by table, and of ``step``."""
        raise InternalError(f"the rows of {self.specs()} are known by snapshots alone, not by {identities} of {step}")

    def require_loadable(self) -> None:  # noqa: B027
        """Raise InvalidArgument if the tables cannot be replaced beneath this module."""

    def require_state(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Raise SpecMismatch if the extra state of a saved module is of another kind than this one's."""

    def settle(self) -> None:  # noqa: B027
        """Write to the tables what waits elsewhere, before they are saved."""

    def go_on(self) -> None:  # noqa: B027
        """The tables were replaced: train their rows from now on. Every rank calls it."""

    def adopt_states(self, states: Sequence[Mapping[str, Any]]) -> None:  # noqa: B027
        """Some of the tables were given the rows of modules saved with these extra states, others are new."""

    def graph_state(self) -> dict[str, Any] | None:
        """What was made of the rows and is to be used again, of which each rank has its part; None: nothing."""
        return None

    def load_graph(self, state: Any, own: Callable[[Any, range], Tensor]) -> None:  # noqa: B027
        """Use what :meth:`graph_state` returned, or the bytes that were saved before there were parts; ``own`` reads
        some rows of a tensor in it."""

    def snapshot(self, root: Path, name: str) -> None:
        """Write rows that are here as a snapshot. Every rank calls it."""
        raise InternalError(f"the rows for {name} in {root} are in a cluster, whose snapshots hold them")

    def restore(self, path: Path) -> None:
        """Read rows that are here from a snapshot. Every rank calls it."""
        raise InternalError(f"the rows of {path} belong into a cluster, which restores them")


class ClusterPlacement(Placement):
    """Rows in tables of a cluster; ``peers`` push them together."""

    first_writes = 0
    """Of a table that nobody has trained."""

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

    def go_on(self) -> None:
        if self._ranks is not None:
            self._ranks.begin_anew()
