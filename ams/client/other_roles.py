"""What a program uses beside the shards of a cluster: graphs of its tables' rows, and slow gears."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from geartrain.ams.client.data_streams import DataStreams
from geartrain.ams.client.shard_calls import ShardCalls
from geartrain.ams.values.errors import ConfigError, InvalidArgument
from geartrain.ams.values.gear_messages import Freshness

if TYPE_CHECKING:
    from geartrain.ams.gear.client.remote import RemoteGears
    from geartrain.ams.graph.client.calls import GraphCalls
    from geartrain.ams.rpc.client.gear import GrpcGearCarrier


class OtherRoles:
    """The ways to them, each opened when it is first asked for: only who uses a role loads its code. Thread-safe."""

    def __init__(self, cluster: Any, calls: ShardCalls) -> None:
        """``cluster`` is the :class:`~geartrain.ams.client.cluster.Cluster` whose shards ``calls`` reach."""
        self._cluster = cluster
        self._calls = calls
        self._graph: GraphCalls | None = None
        self._lock = threading.Lock()

    @property
    def graph(self) -> GraphCalls:
        """Of an embedded cluster the graphs of this process, else those of the graph role. Raises ConfigError."""
        with self._lock:
            if self._graph is None:
                self._graph = self._open_graph()
            return self._graph

    @property
    def graph_service(self) -> GraphCalls | None:
        """:attr:`graph`, if that is another process."""
        return self.graph if self._calls.remote and self._calls.config.graph is not None else None

    @property
    def graphs_of_tables(self) -> GraphCalls | None:
        """The graphs that belong to the cluster's tables, if there can be any."""
        return self._graph if self.graph_service is None else self.graph_service

    def graphs_to_restore(self, there_are_some: bool) -> GraphCalls | None:
        """An embedded cluster takes those there are even if nobody has asked for :attr:`graph` yet."""
        return self.graph if there_are_some and not self._calls.remote else self.graphs_of_tables

    def _open_graph(self) -> GraphCalls:
        if not self._calls.remote:
            from geartrain.ams.graph.service.graphs import Graphs, OwnCluster

            return Graphs(OwnCluster(self._cluster))
        config = self._calls.config
        if config.graph is None:
            raise ConfigError(
                "this cluster has no graph service that is known here; start one with 'geartrain graph' and give its "
                "address: connect(..., config=gt.ClientConfig(graph='host:port')), or GEARTRAIN_CLIENT__GRAPH"
            )
        from geartrain.ams.graph.client.remote import RemoteGraphs

        return RemoteGraphs(config.graph, config)

    def slow_gears(
        self,
        name: str,
        *,
        dim: int,
        streams: Callable[[str], DataStreams],
        wait: bool,
        freshness: Freshness,
    ) -> RemoteGears:
        """The slow gears of the dense part ``name``, found by the ``streams`` that they lease as a job.

        Raises InvalidArgument if the cluster is embedded, GearUnavailable.
        """
        if not self._calls.remote:
            raise InvalidArgument(
                f"this cluster is embedded in the process and has no slow gears of {name!r}; give build= and samples=, "
                "or connect() to a cluster"
            )
        from geartrain.ams.gear.client.remote import RemoteGears
        from geartrain.ams.gear.partitions import job_of
        from geartrain.ams.rpc.channel import seconds_to_connect
        from geartrain.ams.rpc.client.gear import GrpcGearCarrier

        config, holders = self._calls.config, streams(job_of(name)).holders
        connect_seconds = seconds_to_connect(config.attempt_timeout_seconds)

        def open_carrier(address: str, on_wait: Callable[[], None]) -> GrpcGearCarrier:
            return GrpcGearCarrier(
                address, max_message_bytes=config.max_message_bytes, connect_seconds=connect_seconds, on_wait=on_wait
            )

        return RemoteGears(name, dim, holders, open_carrier, config, wait=wait, freshness=freshness)

    def close(self) -> None:
        """Close the way to graphs, if it is open."""
        if self._graph is not None:
            self._graph.close()
