"""Who is waited for is said while it is waited for: a role that is stopped is told from one that works and one that is
not there."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect
from geartrain.ams.rpc.client import silence
from geartrain.ams.rpc.client.scheduler import GrpcSchedulerCarrier
from geartrain.ams.scheduler.service import SchedulerServer
from geartrain.ams.values.config import ClientConfig
from geartrain.ams.values.errors import SchedulerUnavailable, ShardUnavailable, SnapshotFailed
from geartrain.ams.values.optimizers.registry import SGD
from geartrain.launch.hosting import local
from tests.integration.conftest import ServedCluster
from tests.support.refused_address import refused_address
from tests.support.role_process import RoleProcess

IDS = np.arange(500)
SETTINGS = {
    "GEARTRAIN_SCHEDULER__LEASE_SECONDS": "60",
    "GEARTRAIN_SERVER__HEARTBEAT_SECONDS": "0.2",
    "GEARTRAIN_CLIENT__ATTEMPT_TIMEOUT_SECONDS": "20",
}


def role(stack: ExitStack, *arguments: str) -> RoleProcess:
    return stack.enter_context(RoleProcess(*arguments, "--listen=127.0.0.1:0", **SETTINGS))


class Roles:
    def __init__(self, stack: ExitStack) -> None:
        self.scheduler = role(stack, "scheduler", "--num-shards=2")
        self.address = str(self.scheduler.facts["address"])
        self.servers = [role(stack, "server", f"--scheduler={self.address}", f"--shard={shard}") for shard in range(2)]

    def shard(self, number: int) -> str:
        return str(self.servers[number].facts["addresses"][0])


@pytest.fixture(scope="module")
def roles() -> Iterator[Roles]:
    with ExitStack() as stack:
        yield Roles(stack)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call without a reply is looked at early."""
    monkeypatch.setattr(silence, "ASK_AFTER_SECONDS", 0.1)
    monkeypatch.setattr(GrpcSchedulerCarrier, "pauses", (0.1, silence.LONGEST_PAUSE_SECONDS))
    monkeypatch.setattr(silence, "ANSWER_SECONDS", 0.5)


def table_of(cluster: Cluster) -> Any:
    return cluster.create_table("t", dim=4, optimizer=SGD(1.0), num_rows=500, reuse=True)


class Said(logging.Handler):
    """What was logged, and when something of it was."""

    def __init__(self, pattern: str) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.came = threading.Event()
        self._pattern = pattern

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if re.search(self._pattern, self.lines[-1]):
            self.came.set()

    def __enter__(self) -> Said:
        logging.getLogger("geartrain").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("geartrain").removeHandler(self)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("earlier", ["versions", "rows"])
def test_a_stopped_shard_is_unavailable_once_its_time_is_over_whatever_was_asked_before(
    roles: Roles, earlier: str
) -> None:
    """Also where its connection for rows is not made yet, and where it would have to take more memory."""
    config = ClientConfig(attempt_timeout_seconds=0.5, recovery_timeout_seconds=2)
    with connect(roles.address, config=config) as cluster:
        table = table_of(cluster)
        table.versions() if earlier == "versions" else table.pull(IDS)
        with (
            Said(rf"shard 1 at {roles.shard(1)} does not answer[;,] waiting for it") as said,
            roles.servers[1].stopped(),
        ):
            began = time.monotonic()
            with pytest.raises(ShardUnavailable, match=r"shard 1 at .* did not answer within 2 s: .*no reply in time"):
                table.pull(IDS)
            assert time.monotonic() - began < 8
        assert said.came.is_set(), said.lines


@pytest.mark.usefixtures("quick")
def test_a_stopped_shard_is_named_while_the_call_waits_and_the_call_ends_well(roles: Roles) -> None:
    with connect(roles.address) as cluster:
        table = table_of(cluster)
        ones = np.ones((500, 4), np.float32)
        before = table.pull(IDS)
        with Said(rf"shard 1 at {roles.shard(1)} does not answer; waiting for it up to 90 s") as said:
            with roles.servers[1].stopped():
                pushed = threading.Thread(target=table.push, args=(IDS, ones))
                pushed.start()
                assert said.came.wait(20), said.lines
                assert pushed.is_alive()
            pushed.join(20)
            assert not pushed.is_alive()
        assert not [line for line in said.lines if "shard 0" in line]
        assert [line for line in said.lines if f"shard 1 at {roles.shard(1)} answers again" in line]
        np.testing.assert_array_equal(table.pull(IDS), before - 1)


@pytest.mark.usefixtures("quick")
def test_a_shard_that_works_for_long_is_not_named(
    served: Callable[..., ServedCluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = served(1)
    asked, ask = threading.Event(), silence.SilenceLog.check

    def note(self: silence.SilenceLog, *arguments: Any) -> None:
        ask(self, *arguments)
        asked.set()

    with connect(cluster.address, config=ClientConfig(shared_memory=False)) as ours, Said("does not answer") as said:
        table = table_of(ours)
        table.pull(IDS)
        monkeypatch.setattr(silence.SilenceLog, "check", note)
        shard = cluster.servers[0]._held[0].shard
        assert shard is not None
        with shard.engine.turn:  # the shard is at work
            pulled = ours._calls.background(table.pull, IDS)
            assert asked.wait(20)
        pulled.result(20)
        assert not said.lines


@pytest.mark.usefixtures("quick")
def test_a_stopped_scheduler_is_named_and_not_taken_for_one_that_is_not_there(roles: Roles) -> None:
    with connect(roles.address) as cluster:
        with Said(rf"scheduler at {roles.address} does not answer; waiting for it up to 30 s") as said:
            with roles.scheduler.stopped():
                asked = threading.Thread(target=cluster.table_incarnations)
                asked.start()
                assert said.came.wait(20), said.lines
            asked.join(20)
        with roles.scheduler.stopped(), pytest.raises(SchedulerUnavailable) as caught:
            connect(roles.address, config=ClientConfig(connect_timeout_seconds=0.5))
    assert "may be stopped or overloaded" in str(caught.value) and "geartrain up" not in str(caught.value)


def test_a_port_that_refuses_is_not_tried_for_long() -> None:
    with refused_address() as address:
        began = time.monotonic()
        with pytest.raises(SchedulerUnavailable, match=r"connection refused .for [2-5]\.\d s.*geartrain up"):
            connect(address)
        assert time.monotonic() - began < 8
        with pytest.raises(SchedulerUnavailable, match=r"connection refused .for [01]\.\d s"):
            connect(address, config=ClientConfig(refused_timeout_seconds=0.3))


def started(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "geartrain", *arguments]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **SETTINGS},
    )


@pytest.mark.parametrize("command", ["snapshot", "drop", "export"])
def test_a_command_says_for_which_stopped_shard_it_waits(command: str, roles: Roles, tmp_path: Path) -> None:
    with connect(roles.address) as cluster:
        table_of(cluster).assign(IDS, np.ones((500, 4), np.float32))
        address = f"--scheduler={roles.address}"
        arguments = {
            "snapshot": ["snapshot", "create", str(tmp_path / "snapshots"), address],
            "drop": ["table", "drop", "t", "--yes", address],
            "export": ["export", "t", str(tmp_path / "t.safetensors"), address],
        }[command]
        with roles.servers[1].stopped():
            process = started(*arguments)
            try:
                assert process.stderr is not None
                line = next((line for line in process.stderr if "shard 1" in line), "")
            except BaseException:
                process.kill()
                raise
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
        assert re.search(rf"shard 1 .*at {roles.shard(1)}.*up to \d+ s", line), line + err
        assert process.returncode == 0, out + err


def test_a_snapshot_of_nothing_is_refused_but_not_one_of_a_jobs_state_alone(tmp_path: Path) -> None:
    with local() as cluster:
        with pytest.raises(SnapshotFailed, match="has no table"):
            cluster.snapshot(tmp_path, "a")
        assert list(tmp_path.iterdir()) == []
        assert cluster.snapshot(tmp_path, "b", values={"epoch": 1}).result().name == "b"
        assert cluster.snapshot(tmp_path, "c", files={"model": b"x"}).result().name == "c"


def test_the_state_of_a_cluster_says_its_scheduler_is_stopped(roles: Roles) -> None:
    with roles.scheduler.stopped():
        process = started("status", f"--scheduler={roles.address}")
        try:
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 1
    assert "may be stopped or overloaded" in err and "geartrain up" not in err


def test_the_state_of_a_cluster_calls_a_shard_that_gives_no_figures_silent(roles: Roles) -> None:
    with connect(roles.address) as cluster:
        table_of(cluster).push(IDS, np.ones((500, 4), np.float32))
        with roles.servers[1].stopped():  # the scheduler has heard it a moment ago
            assert [shard.state for shard in cluster.status().shards] == ["up", "silent"]
        assert [shard.state for shard in cluster.status().shards] == ["up", "up"]


def test_clients_that_wait_for_nothing_have_no_thread_that_looks_for_silent_roles(
    roles: Roles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "_waits", {})  # other tests of this process may have calls under way
    clients = [connect(roles.address) for _ in range(5)]
    try:
        for client in clients:
            table_of(client).pull(IDS)
        deadline = time.monotonic() + 20
        while any(
            thread.name.startswith(("geartrain-lookout", "geartrain-silence")) for thread in threading.enumerate()
        ):
            assert time.monotonic() < deadline, threading.enumerate()
            time.sleep(0.01)
    finally:
        for client in clients:
            client.close()


def test_a_scheduler_that_serves_is_answered_for() -> None:
    from geartrain.ams.rpc.client.health import answers
    from geartrain.ams.values.config import SchedulerConfig

    server = SchedulerServer(SchedulerConfig(listen="127.0.0.1:0"))
    address = server.start()
    assert answers(address, 20)
    server.stop(0)
    assert not answers(address, 20)
