"""Whatever is killed of a cluster on Ray, the training ends with the loss of a run that nobody disturbed."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

import geartrain as gt
from tests.support.ray_training import await_file, train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_nodes"), pytest.mark.timeout(600)]
MAX_SECONDS_LOST = 60
GATES = {7: "server 0", 13: "server 1", 22: "scheduler", 28: "worker", 36: "nobody"}
"""The step after which each is killed; the last shows that the one before is overcome."""


def test_a_run_whose_processes_are_all_killed_once_ends_with_the_same_loss(tmp_path: Path) -> None:
    import ray

    folders = [tmp_path / "undisturbed", tmp_path / "disturbed"]
    for folder in folders:
        folder.mkdir()
    lost = {}
    with gt.ray.cluster(num_shards=2, workers=1) as cluster:
        (expected,) = cluster.run(train, cluster.address, folders[0], ())
        found: list[float] = []
        run = threading.Thread(target=lambda: found.extend(cluster.run(train, cluster.address, folders[1], [*GATES])))
        run.start()
        killed_at, killed = 0.0, ""
        for step, name in GATES.items():
            at = folders[1] / f"at-{step}"
            reached = await_file(at, 120)
            if killed:
                lost[killed] = reached - killed_at
            killed_at, killed = time.monotonic(), name
            if name == "server 1":
                ray.kill(cluster.actor(name), no_restart=False)
            elif name != "nobody":
                os.kill(int(at.read_text()) if name == "worker" else cluster.facts.pids[name], signal.SIGKILL)
            (folders[1] / f"go-{step}").touch()
        run.join(120)
        assert cluster.address == cluster.facts.scheduler
    print(f"seconds lost: {lost}")
    assert found == [expected]
    assert max(lost.values()) < MAX_SECONDS_LOST, lost
