"""A Ray of several nodes on this machine, each with daemons and resources of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def ray_nodes() -> Iterator[Any]:
    """A ``ray.cluster_utils.Cluster`` of a head for the program and two nodes with two CPUs each."""
    pytest.importorskip("ray", reason="Ray is not installed; it comes with pip install 'geartrain[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        # Read when Ray is loaded. No token is written to the home of whoever runs the tests.
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        import ray
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "include_dashboard": False})
        try:
            for _ in range(2):
                cluster.add_node(**NODE)
            ray.init(cluster.address, logging_level="WARNING", log_to_driver="RAY_TEST_LOGS" in os.environ)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
