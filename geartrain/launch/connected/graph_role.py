"""Adapter from the graph role to a cluster: ``ams.graph`` knows clusters by a protocol alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.cluster_status import ClusterStatus, cluster_status
from geartrain.ams.client.factory import connect
from geartrain.ams.rpc.carrier import AttemptFailed, SchedulerCarrier
from geartrain.ams.rpc.client.dial import dial
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import SchedulerUnavailable
from geartrain.ams.values.scheduler_messages import DescribeCluster

_STATUS_SECONDS = 2.0
_PAUSE_SECONDS = 5.0
"""Time after a scheduler did not answer before it is asked for tables again, so that no selection waits for it."""


class ConnectedCluster:
    """Cluster of a graph service, with a new connection for each build.

    A graph service can so start before its cluster, and outlives shards that are replaced. Implements
    :class:`geartrain.ams.graph.service.graphs.RowCluster`. Thread-safe.
    """

    def __init__(self, scheduler: str, config: ClientConfig) -> None:
        self._scheduler = scheduler
        self._config = config.model_copy(update={"graph": None})
        self._quick = self._config.model_copy(update={"connect_timeout_seconds": _STATUS_SECONDS})
        self._lock = threading.Lock()
        self._carrier: SchedulerCarrier | None = None
        self._silent_until = 0.0
        """time.monotonic() until which an unresponsive scheduler is not asked again."""

    def reading(self) -> Cluster:
        return connect(self._scheduler, config=self._config)

    def status(self) -> ClusterStatus:
        return cluster_status(self._scheduler, config=self._quick)

    def table_incarnations(self) -> Mapping[str, int]:
        with self._lock:
            if time.monotonic() < self._silent_until:
                raise SchedulerUnavailable(f"the scheduler at {self._scheduler} did not answer a moment ago")
            if self._carrier is None:
                self._carrier, _ = dial(self._scheduler, self._quick, once=True)
            try:
                view = self._carrier.call(DescribeCluster(), _STATUS_SECONDS)
            except AttemptFailed as exc:
                self._silent_until = time.monotonic() + _PAUSE_SECONDS
                raise SchedulerUnavailable(str(exc)) from exc
        return {spec.name: spec.incarnation for spec in view.tables}

    def close(self) -> None:
        with self._lock:
            if self._carrier is not None:
                self._carrier.close()
                self._carrier = None
