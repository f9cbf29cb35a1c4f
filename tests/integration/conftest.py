"""Clusters over every carrier, as fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect
from geartrain.ams.programs.models import hosted_models
from geartrain.ams.rpc.client.data_plane import DataPlane
from geartrain.ams.rpc.client.shard import GrpcCarrier
from geartrain.ams.scheduler.service import SchedulerServer
from geartrain.ams.server.role import ShardServer
from geartrain.ams.values.config import ClientConfig, SchedulerConfig, ServerConfig
from geartrain.launch.hosting import local
from tests.support.browsers import chromium

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


over_few_carriers = pytest.mark.parametrize("cluster", ["local-1", "local-3", "tcp-2"], indirect=True)
"""For tests of what is asked of shards beside their rows: how those travel has no part in that."""


@pytest.fixture(params=["local-1", "local-3", "tcp-1", "tcp-2-parts", "shared-2"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster over each carrier of rows; "parts" cuts every message above 64 KiB."""
    kind, shards, *parts = request.param.split("-")
    if kind == "local":
        with local(int(shards)) as embedded:
            yield embedded
        return
    served = ServedCluster(int(shards))
    config = QUICK.model_copy(
        update={"shared_memory": kind == "shared", "part_bytes": 64 << 10 if parts else QUICK.part_bytes}
    )
    try:
        with connect(served.address, config=config) as connected:
            yield connected
    finally:
        served.stop()


def carriers_of(cluster: Cluster) -> list[GrpcCarrier]:
    """The carriers to the shards of a cluster, in order."""
    return cluster._calls._carriers  # type: ignore[attr-defined]


def connect_data_plane(carrier: GrpcCarrier) -> DataPlane:
    """Connect to the data plane of a shard, before anybody has asked for its rows."""
    carrier.data_plane.connect()
    return carrier.data_plane


@pytest.fixture
def browser() -> Iterator[Any]:
    """Chromium without a window, for pages."""
    with chromium() as opened:
        yield opened
