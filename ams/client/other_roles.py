"""Lazy imports of a cluster's other roles: graphs of its tables' rows, and slow gears. Only programs that use a role
load its code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from geartrain.ams.client.data_streams import DataStreams
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.gear_messages import Freshness

if TYPE_CHECKING:
    from geartrain.ams.gear.client.remote import RemoteGears
    from geartrain.ams.graph.client.calls import GraphCalls
    from geartrain.ams.rpc.client.gear import GrpcGearCarrier


def embedded_graphs(cluster: Any) -> GraphCalls:
    """Return the graphs of an embedded :class:`~geartrain.ams.client.cluster.Cluster`, in this process."""
    from geartrain.ams.graph.service.graphs import Graphs, OwnCluster

    return Graphs(OwnCluster(cluster))


def remote_graphs(config: ClientConfig) -> GraphCalls:
    """Return the graphs of the graph role. Raises ConfigError."""
    if config.graph is None:
        raise ConfigError(
            "this cluster has no graph service that is known here; start one with 'geartrain graph' and give its "
            "address: connect(..., config=gt.ClientConfig(graph='host:port')), or GEARTRAIN_CLIENT__GRAPH"
        )
    from geartrain.ams.graph.client.remote import RemoteGraphs

    return RemoteGraphs(config.graph, config)


def remote_gears(
    name: str,
    dim: int,
    streams: Callable[[str], DataStreams],
    config: ClientConfig,
    *,
    wait: bool,
    freshness: Freshness,
) -> RemoteGears:
    """Return the client of the slow gears of the dense part ``name``, found by the ``streams`` that they lease. Raises
    GearUnavailable.
    """
    from geartrain.ams.gear.client.remote import RemoteGears
    from geartrain.ams.gear.partitions import job_of
    from geartrain.ams.rpc.channel import seconds_to_connect
    from geartrain.ams.rpc.client.gear import GrpcGearCarrier

    holders, connect_seconds = streams(job_of(name)).holders, seconds_to_connect(config.attempt_timeout_seconds)

    def open_carrier(address: str, on_wait: Callable[[], None]) -> GrpcGearCarrier:
        return GrpcGearCarrier(
            address, max_message_bytes=config.max_message_bytes, connect_seconds=connect_seconds, on_wait=on_wait
        )

    return RemoteGears(name, dim, holders, open_carrier, config, wait=wait, freshness=freshness)
