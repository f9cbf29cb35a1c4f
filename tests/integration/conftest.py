"""Clusters over every carrier, as fixtures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import grpc
import pytest

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect
from geartrain.ams.programs.models import hosted_models
from geartrain.ams.rpc.client.shard import GrpcCarrier
from geartrain.ams.rpc.payload.data_plane import DataPlane
from geartrain.ams.rpc.server.server import Bound
from geartrain.ams.scheduler.service import SchedulerServer
from geartrain.ams.server.role import ShardServer
from geartrain.ams.server.service import ShardService
from geartrain.ams.values.config import ClientConfig, SchedulerConfig, ServerConfig
from geartrain.launch.hosting import local

QUICK = ClientConfig(attempt_timeout_seconds=10.0, recovery_timeout_seconds=20.0)


class ServedCluster:
    """Scheduler and shards of this process behind real sockets, each of which a test can stop and start."""

    def __init__(self, num_shards: int = 1, **server_settings: object) -> None:
        self.num_shards = num_shards
        self.server_settings = server_settings
        self.scheduler = SchedulerServer(SchedulerConfig(listen="127.0.0.1:0", num_shards=num_shards, lease_seconds=5))
        self.address = self.scheduler.start()
        self.servers = [self.start_server(shard) for shard in range(num_shards)]

    def start_server(self, shard: int) -> ShardServer:
        server = ShardServer(
            ServerConfig(
                scheduler=self.address,
                shard=shard,
                heartbeat_seconds=0.05,
                **self.server_settings,  # type: ignore[arg-type]
            ),
            hosted_models(),
        )
        server.start()
        return server

    def stop(self) -> None:
        for server in self.servers:
            server.stop(0)
        self.scheduler.stop(0)


@pytest.fixture
def served() -> Iterator[Callable[..., ServedCluster]]:
    with ExitStack() as stack:

        def make(num_shards: int = 1, **server_settings: object) -> ServedCluster:
            cluster = ServedCluster(num_shards, **server_settings)
            stack.callback(cluster.stop)
            return cluster

        yield make


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the requests and replies of pulls and pushes of served shards, as they travel."""
    sizes: list[int] = []

    def measured(name: str) -> None:
        whole = getattr(ShardService, name)

        def measuring(self: ShardService, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
            reply: bytes = whole(self, data, servicer_context)
            sizes.extend((len(data), len(reply)))
            return reply

        monkeypatch.setattr(ShardService, name, measuring)

    for name in ("pull", "push", "assign"):
        measured(name)
    return sizes


over_few_carriers = pytest.mark.parametrize("cluster", ["local-1", "local-3", "grpc-2"], indirect=True)
"""For tests of what is asked of shards beside their rows: the ways of rows have no part in that."""


@pytest.fixture(params=["local-1", "local-3", "grpc-1", "grpc-2", "grpc-2-parts", "bulk-1", "bulk-2", "shared-2"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster over each carrier.

    "parts" cuts every message above 64 KiB; "bulk" sends all calls for rows over bulk connections, "shared" through
    shared memory.
    """
    kind, shards, *parts = request.param.split("-")
    if kind == "local":
        with local(int(shards)) as embedded:
            yield embedded
        return
    served = ServedCluster(int(shards))
    ways = {"shared_memory": kind == "shared", "bulk_connections": kind == "bulk"}
    config = QUICK.model_copy(update={**ways, **({"part_bytes": 64 << 10} if parts else {})})
    try:
        with connect(served.address, config=config) as connected:
            if kind in ("shared", "bulk"):
                for carrier in carriers_of(connected):
                    connect_data_plane(carrier)
            yield connected
    finally:
        served.stop()


def without_method(name: str) -> property:
    """``ShardService.bound`` of a shard of an earlier version, which lacks an RPC."""
    bound = ShardService.bound.func

    def older(self: ShardService) -> Bound:
        service, methods, streams = bound(self)
        return Bound(service, {one: method for one, method in methods.items() if one != name}, streams)

    return property(older)


def carriers_of(cluster: Cluster) -> list[GrpcCarrier]:
    """The carriers to the shards of a cluster, in order."""
    return cluster._calls._carriers  # type: ignore[attr-defined]


def connect_data_plane(carrier: GrpcCarrier) -> DataPlane:
    """Connect to the data plane of a shard; a connection that is lost is made again by the call that lacks it."""
    plane = carrier.data_plane
    assert plane is not None
    plane._begin = lambda work: work()
    for _ in range(2):  # a thread may be at it
        plane._making_since = -math.inf
        plane.want()
    assert plane._connection is not None and not plane._connection.is_lost
    return plane
