"""Factories of a cluster's client: a cluster embedded in this process, or one reached over gRPC."""

from __future__ import annotations

from types import MappingProxyType

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.scheduler_calls import await_cluster
from geartrain.ams.client.writes import ClientStream, check_stream
from geartrain.ams.observe import failpoints
from geartrain.ams.programs.hosted import HostedModels
from geartrain.ams.rpc.client.dial import dial
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.scheduler_messages import DescribeCluster, IssueIncarnation
from geartrain.ams.values.text import quoted


def local(
    num_shards: int = 1,
    *,
    config: ClientConfig | None = None,
    stream: str | None = None,
    incarnation: int | None = None,
    models: HostedModels = MappingProxyType({}),
) -> Cluster:
    """Return a cluster embedded in this process: the same shards on threads, without sockets.

    ``stream`` and ``incarnation`` are as in :func:`connect`; ``models`` are the models that the shards host.
    Raises ConfigError if ``num_shards`` is not 1 … 4096.
    """
    # Only a process that embeds shards loads the server's code.
    from geartrain.ams.client.embedded import EmbeddedCluster

    failpoints.arm_from_environment()
    config = _checked_config(config)
    check_stream(stream, incarnation)
    embedded = EmbeddedCluster(num_shards, models)
    try:
        taken = embedded.scheduler.call(IssueIncarnation(chosen=incarnation or 0), None)
    except BaseException:
        embedded.close()
        raise
    return Cluster(
        embedded.scheduler,
        embedded.scheduler.call(DescribeCluster(), None),
        embedded.open_carrier,
        config,
        stream=ClientStream(config.max_in_flight_writes, stream, taken),
        remote=False,
        close=embedded.close,
    )


def connect(
    address: str, *, config: ClientConfig | None = None, stream: str | None = None, incarnation: int | None = None
) -> Cluster:
    """Return the cluster whose scheduler listens at ``address`` ("host:port"), once all its shards have registered.

    ``stream`` names this process's writes, for example ``"job/rank0"``, and takes them over: from now on shards refuse
    a process of the same name with a lower ``incarnation``, and deduplicate writes numbered by it
    (``table.push(…, sequence=step)``). Without a name no process is superseded. The scheduler assigns incarnations,
    each higher than all before, whatever the machines' clocks say; a given one (of the processes of one job, for
    example) must be from 1 to 2**62, or one that the scheduler assigned. Costs two RPCs to the scheduler.

    Raises InvalidArgument (not a stream name), ConfigError (malformed address), SchedulerUnavailable (no answer within
    ``connect_timeout_seconds``, or connections are refused for ``refused_timeout_seconds``), ClusterNotReady (shards
    are missing after ``recovery_timeout_seconds``) or StaleClient (a higher incarnation has the stream). Waits are
    logged.
    """
    failpoints.arm_from_environment()
    config = _checked_config(config)
    check_stream(stream, incarnation)
    scheduler, open_carrier = dial(address, config)
    try:
        view, taken = await_cluster(scheduler, address, config, incarnation or 0)
        writes = ClientStream(config.max_in_flight_writes, stream, taken)
        return Cluster(scheduler, view, open_carrier, config, stream=writes, remote=True)
    except BaseException:
        scheduler.close()
        raise


def _checked_config(config: ClientConfig | None) -> ClientConfig:
    if config is not None and not isinstance(config, ClientConfig):
        raise ConfigError(f"config is {quoted(config)}; it must be a gt.ClientConfig(...), or None for its defaults")
    return config or ClientConfig()
