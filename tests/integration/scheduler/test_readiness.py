"""What roles are ready for, over the standard health protocol."""

from __future__ import annotations

import time
from collections.abc import Callable

from geartrain.ams.client.cluster_status import cluster_status
from geartrain.ams.client.factory import connect
from geartrain.ams.rpc.client.health import is_serving
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.ams.values.scheduler_messages import CreateClusterTable
from geartrain.ams.values.specs import TableSpec
from tests.integration.conftest import ServedCluster

SERVICES = ("", "shards", "complete", "restored", "ready")


def await_readiness(address: str, schedulers: tuple[str, ...] = (), **expected: bool) -> None:
    deadline = time.monotonic() + 30
    while True:
        found = {service or "serves": is_serving(address, service=service) for service in SERVICES}
        if found == expected:
            assert address not in schedulers or cluster_status(address).ready == found["ready"]  # one meaning
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_a_scheduler_says_by_name_what_its_cluster_lacks(served: Callable[..., ServedCluster]) -> None:
    cluster = served(2)
    well = {"serves": True, "shards": True, "complete": True, "restored": True, "ready": True}
    await_readiness(cluster.address, (cluster.address,), **well)
    with connect(cluster.address) as ours:
        ours.create_table("t", dim=1, optimizer=SGD(1.0))
        cluster.servers[1].stop(0)
        await_readiness(cluster.address, (cluster.address,), **{**well, "shards": False, "ready": False})
        cluster.servers[1] = cluster.start_server(1)
        await_readiness(cluster.address, (cluster.address,), **{**well, "complete": False, "ready": False})
        ours.drop_table("t")
        spec = TableSpec(name="r", dim=1, optimizer=SGD(1.0))
        ours._scheduler.carrier.call(CreateClusterTable(spec=spec, for_restore=True), 30)
        await_readiness(cluster.address, (cluster.address,), **{**well, "restored": False, "ready": False})
        shard = cluster.servers[0].bound_addresses[0]
        lacks = {"serves": True, "shards": False, "complete": False, "restored": False, "ready": False}
        await_readiness(shard, **lacks)  # of a server nobody asks for shards and tables
        ours.drop_table("r")
    await_readiness(cluster.address, (cluster.address,), **well)
    await_readiness(shard, **{**lacks, "restored": True, "ready": True})
