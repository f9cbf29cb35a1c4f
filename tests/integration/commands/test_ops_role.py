"""``gt.ops.Role``: a role in the caller's process is what its command runs, and takes no signals."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import numpy as np
import pytest

import geartrain as gt
from geartrain.ams.values.config import CERTIFIED_ROLES, ClusterConfig, SecurityConfig
from geartrain.launch.certificates import create_authority, issue


def test_roles_of_this_process_are_a_cluster_and_leave_its_signals_alone() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with gt.ops.Role("scheduler", listen="127.0.0.1:0", num_shards=2) as scheduler:
        assert (scheduler.name, scheduler.facts["num_shards"]) == ("scheduler", 2)
        servers = [gt.ops.Role("server", scheduler=scheduler.address, shard=shard) for shard in range(2)]
        with gt.connect(scheduler.address) as cluster:
            table = cluster.create_table("t", dim=2, optimizer=gt.SGD(0.1))
            table.assign(np.arange(9), np.ones((9, 2), np.float32))
            assert table.pull(np.arange(9)).sum() == 18
        for server in servers:
            server.close(0)
            server.close(0)  # again
            assert server.wait() == ""
    assert {number: signal.getsignal(number) for number in before} == before


def test_a_role_says_why_it_ended_by_itself() -> None:
    with gt.ops.Role("scheduler", listen="127.0.0.1:0", lease_seconds=2, num_shards=1) as scheduler:
        address = scheduler.address
        with gt.ops.Role("server", scheduler=address, heartbeat_seconds=0.05) as server:
            ended: list[str] = []
            watch = threading.Thread(target=lambda: ended.append(server.wait()))
            watch.start()
            scheduler.close(0)
            with gt.ops.Role("scheduler", listen=address, num_shards=2):  # another cluster, without its shard
                watch.join(30)
            assert "the scheduler refuses shard 0" in ended[0]


def test_what_it_cannot_be_is_said_before_it_starts() -> None:
    with pytest.raises(gt.errors.ConfigError, match=r"no role 'sheduler'; did you mean 'scheduler'\?"):
        gt.ops.Role("sheduler")
    with pytest.raises(gt.errors.ConfigError, match=r"unknown key 'num_shard'; did you mean 'num_shards'\?"):
        gt.ops.Role("scheduler", num_shard=1)
    with pytest.raises(gt.errors.ConfigError, match=r"listen '0\.0\.0\.0:0' can be reached from other machines"):
        gt.ops.Role("scheduler", listen="0.0.0.0:0")
    with (
        gt.ops.Role("scheduler", listen="127.0.0.1:0") as scheduler,
        pytest.raises(gt.errors.ConfigError, match=f"{scheduler.address} is in use by the scheduler of a cluster"),
    ):
        gt.ops.Role("scheduler", listen=scheduler.address)


def test_it_shows_the_certificate_of_its_role(tmp_path: Path) -> None:
    create_authority(tmp_path, "toys")
    for role in CERTIFIED_ROLES:
        issue(tmp_path, tmp_path, [role])
    config = ClusterConfig(security=SecurityConfig(folder=str(tmp_path)))
    with gt.ops.Role("scheduler", config, listen="127.0.0.1:0") as scheduler:
        with gt.ops.Role("server", config, scheduler=scheduler.address) as server:
            assert server.address
        (tmp_path / "graph.pem").unlink()
        with pytest.raises(gt.errors.ConfigError, match=r"graph\.pem does not exist"):
            gt.ops.Role("graph", config, listen="127.0.0.1:0", scheduler=scheduler.address)
