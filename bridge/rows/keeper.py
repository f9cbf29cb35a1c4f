"""What saving and loading a model ask of whoever keeps rows of it: a head, a slow gear, an attached module."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geartrain.ams.values.errors import InternalError
from geartrain.ams.values.specs import TableSpec
from geartrain.bridge.collectives.communicator import Communicator

if TYPE_CHECKING:
    from geartrain.ams.client.cluster import Cluster


class RowKeeper(ABC):
    """The rows of one module. A module that has some says so by a property ``row_keeper``."""

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

    def graph_to_bytes(self) -> bytes | None:
        """What was made of the rows and is to be used again; None: nothing."""
        return None

    def graph_from_bytes(self, data: bytes) -> None:  # noqa: B027
        """Use what :meth:`graph_to_bytes` returned."""

    def snapshot(self, root: Path, name: str) -> None:
        """Write rows that are here as a snapshot. Every rank calls it."""
        raise InternalError(f"the rows for {name} in {root} are in a cluster, whose snapshots hold them")

    def restore(self, path: Path) -> None:
        """Read rows that are here from a snapshot. Every rank calls it."""
        raise InternalError(f"the rows of {path} belong into a cluster, which restores them")
