"""A forked child of a client: it is told to open a cluster of its own, and its parent's rows are whole."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.integration.conftest import ServedCluster

SCRIPT = """
import os, sys
import numpy as np
import geartrain as gt

ids, ones = np.arange(3_000), np.ones((3_000, 32), np.float32)
cluster = gt.connect(sys.argv[1]) if len(sys.argv) > 1 else gt.local(num_shards=2)
with cluster:
    table = cluster.create_table("t", dim=32, optimizer=gt.SGD(1.0), num_rows=3_000, initializer=gt.Constant(0))
    table.push(ids, ones)
    child = os.fork()
    if child == 0:
        calls = {
            "push": lambda: table.push(ids, ones),
            "pull": lambda: table.pull(ids),
            "pull_async": lambda: table.pull_async(ids).result(10),
            "assign": lambda: table.assign(ids, ones),
            "table": lambda: cluster.table("t"),
            "create_table": lambda: cluster.create_table("u", dim=2, optimizer=gt.SGD(1.0)),
            "drop_table": lambda: cluster.drop_table("t"),
            "status": cluster.status,
            "fence": lambda: cluster.fence("job", 1),
        }
        for name, call in calls.items():
            try:
                call()
            except gt.errors.Unavailable as exc:
                assert "was forked from it; open one there" in str(exc), exc
            else:
                raise AssertionError(f"{name} was answered")
        if len(sys.argv) > 1:
            with gt.connect(sys.argv[1]) as own:
                own.table("t").push(ids, ones)
        sys.exit()  # leaves the 'with' block
    assert os.waitpid(child, 0)[1] == 0
    for _ in range(3):
        assert not table.push(ids, ones).duplicate
    pushes = 5 if len(sys.argv) > 1 else 4
    assert (table.pull(ids) == -pushes).all(), table.pull(ids)
print("whole")
"""


@pytest.mark.parametrize("where", ["embedded", "connected"])
def test_a_forked_child_opens_a_cluster_of_its_own(served: Callable[..., ServedCluster], where: str) -> None:
    arguments = [served(2).address] if where == "connected" else []
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "whole\n", done.stderr
