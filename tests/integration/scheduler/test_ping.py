"""Every role says which version it is and since when, whatever state it is in."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator

import pytest

from geartrain.ams.graph.service.role import GraphServer
from geartrain.ams.rpc.client.calls import GrpcCalls
from geartrain.ams.rpc.services import GEAR, GRAPH, SCHEDULER, SHARD, Service
from geartrain.ams.values.config import GraphConfig
from geartrain.ams.values.errors import ShardUnavailable
from geartrain.ams.values.rpc import Ping, Pong, version
from geartrain.ams.values.shard_messages import Describe
from geartrain.launch.connected.graph_role import ConnectedCluster
from tests.integration.conftest import QUICK, ServedCluster
from tests.integration.gear.gear_cluster import GearCluster, gear_cluster
from tests.support.command_line import typed


@pytest.fixture(scope="module")
def roles() -> Iterator[tuple[GearCluster, str, str]]:
    """A cluster, its slow gear and its graph service."""
    with gear_cluster() as cluster:
        _, gear = cluster.start_gear()
        graph = GraphServer(GraphConfig(listen="127.0.0.1:0"), ConnectedCluster(cluster.address, QUICK))
        yield cluster, gear, graph.start()
        graph.stop(0)


def ping(service: Service, address: str) -> Pong:
    calls = GrpcCalls(service, "role", address)
    try:
        return calls.call(Ping(), 10.0)
    finally:
        calls.close()


def status(*arguments: str) -> str:
    done = typed("status", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_status_shows_the_version_and_the_age_of_every_role(roles: tuple[GearCluster, str, str]) -> None:
    cluster, gear, graph = roles
    where = ("--scheduler", cluster.address, "--graph", graph)
    told = json.loads(status(*where, "--json"))
    assert told["map_version"] == 1
    by_address = {item["address"]: item for item in told["roles"]}
    shards = {shard["address"]: shard["incarnation"] for shard in told["shards"]}
    expected = {cluster.address: "scheduler", gear: "slowgear", graph: "graph", **dict.fromkeys(shards, "server")}
    assert {address: item["role"] for address, item in by_address.items()} == expected
    assert all(item["version"] == version() and item["uptime_seconds"] > 0 for item in by_address.values())
    assert all(item["pid"] == os.getpid() for item in by_address.values())
    assert {address: by_address[address]["incarnation"] for address in shards} == shards
    (told_gear,) = told["slow_gears"]
    assert told_gear["process"] == f"{gear}#{by_address[gear]['incarnation']}"
    lines = status(*where)
    for start in (f"scheduler {cluster.address}", f"graph service {graph}"):
        assert f"{start} (pid {os.getpid()}, version {version()}, up " in lines
    assert lines.count(version()) == 5


def test_uptime_goes_on_and_is_that_of_the_role(roles: tuple[GearCluster, str, str]) -> None:
    cluster, gear, graph = roles
    for service, address in ((SCHEDULER, cluster.address), (GRAPH, graph), (GEAR, gear)):
        first, second = ping(service, address), ping(service, address)
        assert first.uptime_seconds < second.uptime_seconds and first.incarnation == second.incarnation


def test_a_server_without_a_shard_answers_all_the_same(served: Callable[..., ServedCluster]) -> None:
    cluster = served(1)
    (server,) = cluster.servers
    held = server._held[0]
    assert ping(SHARD, held.address).incarnation == held.incarnation
    held.service._shard = None
    calls = GrpcCalls(SHARD, "shard", held.address)
    try:
        with pytest.raises(ShardUnavailable):
            calls.call(Describe(), 10.0)
        assert calls.call(Ping(), 10.0).incarnation == 0
    finally:
        calls.close()
        held.service._shard = held.shard
