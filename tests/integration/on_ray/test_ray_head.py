"""Ray's head restarts, with a store of its own that outlives it: roles and training go on, and can be started again."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

import geartrain as gt
from tests.support.ray_training import await_file, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_a_training_goes_on_through_a_restart_of_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="Ray is not installed; it comes with pip install 'geartrain[ray]'")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray.cluster_utils import Cluster

    folders = [tmp_path / "undisturbed", tmp_path / "disturbed"]
    for folder in folders:
        folder.mkdir()
    node = {"num_cpus": 2, "object_store_memory": 80 << 20}
    store = {"gcs_storage": "rocksdb", "gcs_storage_path": str(tmp_path / "store")}
    nodes = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False, "_system_config": store})
    try:
        nodes.add_node(**node)
        ray.init(nodes.address, logging_level="WARNING", log_to_driver=False)
        with gt.ray.cluster(num_shards=2, workers=1) as cluster:
            (expected,) = cluster.run(train, cluster.address, folders[0], ())
            found: list[float] = []
            run = threading.Thread(target=lambda: found.extend(cluster.run(train, cluster.address, folders[1], [7])))
            run.start()
            await_file(folders[1] / "at-7", 120)
            nodes.head_node.kill_gcs_server()
            os.kill(cluster.facts.pids["server 0"], signal.SIGKILL)  # nobody is there who could start it again
            nodes.head_node.start_gcs_server()
            (folders[1] / "go-7").touch()
            run.join(240)
        assert found == [expected]
    finally:
        ray.shutdown()
        nodes.shutdown()
