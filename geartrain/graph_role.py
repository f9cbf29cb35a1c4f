"""Where the graph role meets the cluster whose rows it reads: ``ams.graph`` knows clusters by a protocol alone."""

from __future__ import annotations

from geartrain.ams.cluster import Cluster, connect
from geartrain.ams.cluster_status import ClusterStatus, cluster_status
from geartrain.ams.config import ClientConfig

_STATUS_SECONDS = 2.0


class ConnectedCluster:
    """Implements :class:`geartrain.ams.graph.graphs.RowCluster`: connects anew for each build.

    So a graph service starts before its cluster, and outlives shards that are replaced.
    """

    def __init__(self, scheduler: str, config: ClientConfig) -> None:
        self._scheduler = scheduler
        self._config = config.model_copy(update={"graph": None})
        self._quick = self._config.model_copy(update={"connect_timeout_seconds": _STATUS_SECONDS})

    def reading(self) -> Cluster:
        """See :class:`RowCluster`."""
        return connect(self._scheduler, config=self._config)

    def status(self) -> ClusterStatus:
        """See :class:`RowCluster`."""
        return cluster_status(self._scheduler, config=self._quick)
