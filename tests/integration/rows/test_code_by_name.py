"""What travels and what is restored names no code: a server runs what its own setting names, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect
from geartrain.ams.scheduler.service import SchedulerServer
from geartrain.ams.values.config import SchedulerConfig
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.expiry.rules import Rule
from geartrain.ams.values.optimizers.registry import SGD

OWN = """
import geartrain as gt

@gt.expiry_rule
def stale(rows):
    return rows.ids < 10
"""
STRANGE = """
import pathlib
import geartrain as gt

pathlib.Path(__file__).with_suffix(".ran").touch()

@gt.expiry_rule
def stale(rows):
    return rows.ids >= 0
"""


@pytest.fixture
def modules(tmp_path: Path) -> Path:
    """A folder of modules that the server could import: two of the operator's, and one that came with a snapshot."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "later.py").write_text(OWN)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "strange.py").write_text(STRANGE)
    return tmp_path


@pytest.fixture
def served(modules: Path) -> Iterator[list[Cluster]]:
    """A cluster whose shard is a process that knows the rules of two modules; then one that knows one of them."""
    clusters: list[Cluster] = []
    schedulers, processes = [], []
    try:
        for known in ("own,later", "own"):
            schedulers.append(SchedulerServer(SchedulerConfig(listen="127.0.0.1:0", num_shards=1)))
            address = schedulers[-1].start()
            command = ["server", "--scheduler", address, "--rule-modules", known, "--end-with-parent"]
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "geartrain", *command],
                    env={**os.environ, "PYTHONPATH": str(modules)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            clusters.append(connect(address))
        for process in processes:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["ready"] == "server"
        yield clusters
    finally:
        for cluster in clusters:
            cluster.close()
        for process in processes:
            process.kill()
            process.communicate()
        for scheduler in schedulers:
            scheduler.stop(0)


def test_a_rule_of_a_client_or_a_snapshot_makes_no_server_import_a_module(served: list[Cluster], modules: Path) -> None:
    first, second = served
    table = first.create_table("t", dim=2, optimizer=SGD(0.1), expiry=Rule("later:stale"))
    table.push(np.arange(30), np.ones((30, 2), np.float32))
    assert table.expire().expired == 10
    assert table.expire(Rule("own:stale"), dry_run=True).expired == 0
    for named in ("model.strange:stale", "os:abort", "later:gt"):
        with pytest.raises(InvalidArgument, match=r"known: later:stale, own:stale\).*server\.rule_modules"):
            table.expire(Rule(named))
        with pytest.raises(InvalidArgument, match=r"server\.rule_modules"):
            first.create_table("u", dim=2, optimizer=SGD(0.1), expiry=Rule(named))
    path = first.snapshot(modules / "model", "a").result()
    kept = second.create_table("t", dim=2, optimizer=SGD(0.1))
    kept.push(np.arange(5), np.ones((5, 2), np.float32))
    with pytest.raises(InvalidArgument, match=r"later:stale is not known here.*--rule-modules later"):
        second.restore(path, replace=True)
    assert second.status().tables[0].rows == 5, "what a restore would have replaced is there still"
    second.drop_table("t")
    with pytest.raises(InvalidArgument, match=r"rule later:stale is not known here.*--rule-modules later"):
        second.restore(path)
    first.drop_table("t")
    first.restore(path)
    assert first.table("t").expire().expired == 0
    assert not (modules / "model" / "strange.ran").exists()
