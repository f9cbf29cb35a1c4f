"""Clusters over every carrier, as fixtures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from geartrain.ams.cluster import Cluster, connect
from geartrain.ams.config import ClientConfig, SchedulerConfig, ServerConfig
from geartrain.ams.scheduler.service import SchedulerServer
from geartrain.ams.server.service import ShardServer
from geartrain.bridge.hosted.models import hosted_models
from geartrain.hosting import local

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


@pytest.fixture(params=["local-1", "local-3", "grpc-1", "grpc-2", "grpc-2-parts"])
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A cluster over each carrier; "parts" cuts every payload above 64 KiB."""
    kind, shards, *parts = request.param.split("-")
    if kind == "local":
        with local(int(shards)) as embedded:
            yield embedded
        return
    served = ServedCluster(int(shards))
    config = ClientConfig(part_bytes=64 << 10, attempt_timeout_seconds=10.0) if parts else QUICK
    try:
        with connect(served.address, config=config) as connected:
            yield connected
    finally:
        served.stop()
