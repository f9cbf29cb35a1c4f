"""``geartrain up`` with real processes: ready when it says so, and nothing left behind however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import traceback
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import geartrain as gt
from geartrain.ams.client.cluster_status import cluster_status
from geartrain.ams.values.config import ClientConfig, identify
from geartrain.launch.up import MAX_RESTARTS
from tests.support.command_line import typed

GONE_WITHIN_SECONDS = 20.0


class Up:
    """A running ``geartrain up`` and what its ready line said."""

    def __init__(self, process: subprocess.Popen[str], facts: dict[str, Any]) -> None:
        self.process = process
        self.facts = facts
        self.children = [psutil.Process(pid) for pid in facts["pids"].values()]

    def assert_no_child_is_left(self) -> None:
        _, alive = psutil.wait_procs(self.children, GONE_WITHIN_SECONDS)
        for child in alive:
            child.kill()
        assert alive == []


@contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "geartrain", "up", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def up(*arguments: str) -> Iterator[Up]:
    with started("--json", "--scheduler-listen=127.0.0.1:0", *arguments) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        running = Up(process, json.loads(line))
        try:
            yield running
        finally:
            process.kill()
            running.assert_no_child_is_left()


def kill_child(parent: psutil.Process, role: str) -> None:
    """Kill the first live child of that role."""
    for child in parent.children():
        if child.status() != psutil.STATUS_ZOMBIE and role in child.cmdline():
            child.kill()
            return
    raise AssertionError(f"no {role} lives")


def test_a_cluster_serves_as_soon_as_up_says_ready() -> None:
    with up("--shards=2") as running:
        status = cluster_status(running.facts["scheduler"])
        assert status.ready
        assert [shard.address for shard in status.shards] == running.facts["shards"]
        with gt.connect(running.facts["scheduler"]) as cluster:
            table = cluster.create_table("t", dim=4, optimizer=gt.SGD(1.0), initializer=gt.Constant(2.0))
            assert np.array_equal(table.pull(np.arange(100)), np.full((100, 4), 2.0, np.float32))


def test_a_graph_service_comes_with_the_cluster_and_comes_back_where_it_was() -> None:
    with up("--shards=1", "--graph-listen=127.0.0.1:0") as running:
        config = ClientConfig(graph=running.facts["graph"])
        with gt.connect(running.facts["scheduler"], config=config) as cluster:
            cluster.create_table("t", dim=4, num_rows=50, optimizer=gt.SGD(1.0))
            assert cluster.graph.build("t", 3).graph.version == 1
            kill_child(psutil.Process(running.process.pid), "graph")
            assert cluster.graph.build("t", 3).graph.version == 1  # it kept nothing, and answers again


def test_each_role_tells_prometheus_at_an_address_that_it_keeps() -> None:
    pytest.importorskip("prometheus_client", reason="needs pip install 'geartrain[metrics]'")

    def told(address: str) -> tuple[str, ...]:
        """The role that answers there, once it does."""
        while True:
            try:
                text = urllib.request.urlopen(f"http://{address}/metrics", timeout=20).read().decode()
            except OSError:  # it is being started
                continue
            return tuple(re.findall(r'^geartrain_build_info{.*role="(\w+)"', text, re.MULTILINE))

    with up("--metrics=127.0.0.1:0", "--shards=2", "--graph", "--graph-listen=127.0.0.1:0") as running:
        metrics = running.facts["metrics"]
        assert list(metrics) == ["scheduler", "server 0", "server 1", "graph"]
        assert len(set(metrics.values())) == 4
        assert [told(address) for address in metrics.values()] == [(name.split()[0],) for name in metrics]
        dead = psutil.Process(running.facts["pids"]["server 1"])
        dead.kill()
        dead.wait()
        assert told(metrics["server 1"]) == ("server",)


def test_the_ready_line_for_people_counts_the_shards_and_names_the_processes() -> None:
    with started("--shards=2", "--scheduler-listen=127.0.0.1:0") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        children = {child.pid for child in psutil.Process(process.pid).children()}
        process.terminate()
        process.wait(GONE_WITHIN_SECONDS)
    found = re.fullmatch(r"ready: scheduler 127.0.0.1:\d+ \(pid (\d+)\) · 2 shards \(pid (\d+), (\d+)\)\n", line)
    assert found is not None, line
    assert {int(pid) for pid in found.groups()} == children


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_everything_in_good_order(number: signal.Signals) -> None:
    with up("--shards=2") as running:
        running.process.send_signal(number)
        _, log = running.process.communicate(timeout=GONE_WITHIN_SECONDS)
        assert running.process.returncode == 0, log
        assert "Traceback" not in log
        assert "killed" not in log
        running.assert_no_child_is_left()


@pytest.mark.parametrize("named", [False, True])
def test_what_changes_tables_is_written_to_the_audit_and_not_to_the_terminal(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit = tmp_path / "named" if named else tmp_path / "kept" / "audit.log"
    if named:
        monkeypatch.setenv("GEARTRAIN_SECURITY__AUDIT", str(audit))
    typed("certs", "init", str(tmp_path / "ca"))
    monkeypatch.setenv("GEARTRAIN_SECURITY__FOLDER", str(tmp_path / "ca"))
    with up("--shards=1", "--data", str(tmp_path / "kept")) as running:
        identify(str(tmp_path / "ca"))
        with gt.connect(running.facts["scheduler"]) as cluster:
            cluster.create_table("t", dim=2, optimizer=gt.SGD(1.0))
        running.process.terminate()
        _, log = running.process.communicate(timeout=GONE_WITHIN_SECONDS)
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert ["t"] in [line["tables"] for line in lines]
    assert '"rpc"' not in log


def test_an_audit_that_cannot_be_written_ends_the_start(tmp_path: Path) -> None:
    with started("--shards=1", "--scheduler-listen=127.0.0.1:0", "--audit", str(tmp_path)) as process:
        _, log = process.communicate(timeout=GONE_WITHIN_SECONDS)
        assert process.returncode == 2
        assert f"security.audit is '{tmp_path}', which cannot be written: Is a directory" in log


def test_a_child_that_cannot_end_is_killed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEARTRAIN_SERVER__LEAVE_TIMEOUT_SECONDS", "0")
    with up("--shards=1") as running:
        psutil.Process(running.facts["pids"]["server 0"]).suspend()
        running.process.terminate()
        _, log = running.process.communicate(timeout=GONE_WITHIN_SECONDS)
        assert running.process.returncode == 0
        assert "server 0 | did not end within 5 s: killed" in log
        running.assert_no_child_is_left()


def test_no_child_outlives_a_parent_that_was_killed() -> None:
    with up("--shards=2") as running:
        running.process.kill()
        running.assert_no_child_is_left()


@pytest.mark.parametrize("name", ["scheduler", "server 1"])
def test_without_restarts_a_child_that_dies_ends_the_cluster_and_is_named(name: str) -> None:
    with up("--shards=2", "--no-restart") as running:
        psutil.Process(running.facts["pids"][name]).kill()
        _, log = running.process.communicate(timeout=GONE_WITHIN_SECONDS)
        assert running.process.returncode == 1
        assert f"error: {name} (pid {running.facts['pids'][name]}) ended by itself (killed by SIGKILL)" in log
        assert "Traceback" not in log
        running.assert_no_child_is_left()


def told(*arguments: Any, code: int = 0) -> str:
    """What a command says of a cluster that runs."""
    *command, running = arguments
    scheduler = f"--scheduler={running.facts['scheduler']}"
    done = typed(*command, scheduler)
    assert done.returncode == code, done.stderr
    return done.stdout


@pytest.mark.parametrize(("name", "keeps"), [("scheduler", False), ("scheduler", True), ("server 1", True)])
def test_a_role_that_dies_comes_back_where_it_was(name: str, keeps: bool, tmp_path: Path) -> None:
    with up("--shards=2", *(["--data", str(tmp_path)] if keeps else [])) as running:
        config = ClientConfig(attempt_timeout_seconds=5, recovery_timeout_seconds=60, connect_timeout_seconds=60)
        config = config.model_copy(update={"refused_timeout_seconds": 60})  # while a role is started again
        with gt.connect(running.facts["scheduler"], config=config) as cluster:
            table = cluster.create_table("t", dim=2, optimizer=gt.SGD(1.0), num_rows=8192)
            ids = np.array([0, 8191])
            table.push(ids, np.ones((2, 2), np.float32))
            before = table.pull(ids)
            psutil.Process(running.facts["pids"][name]).kill()
            if name == "scheduler":  # the shards, which still hold all rows, tell it what there is
                assert running.process.stderr is not None
                while "scheduler | ended by itself" not in running.process.stderr.readline():
                    pass
                with gt.connect(running.facts["scheduler"], config=config) as again:
                    np.testing.assert_array_equal(again.table("t").pull(ids), before)
            else:
                with pytest.raises(gt.errors.ShardRestarted, match="shard 1 was restarted") as told_of:
                    table.pull(ids)
                assert "NotSent" not in "".join(traceback.format_exception(told_of.value))
                assert table.pull(ids[:1]).shape == (1, 2)
                with gt.connect(running.facts["scheduler"], config=config) as later:
                    with pytest.raises(gt.errors.ShardRestarted, match=r"incomplete: .* drop it"):
                        later.table("t")
                    with pytest.raises(gt.errors.SnapshotFailed, match="none that is whole"):
                        later.snapshot(tmp_path / "snapshots").result()
                    assert "t: 1 row, incomplete: a shard" in told("table", "list", running)
                    assert "table t: incomplete" in told("status", running, code=1)
                    assert "dropped t" in told("table", "drop", "t", "--yes", running)
                    assert "has no table" in told("table", "list", running)
                    again = later.create_table("t", dim=2, optimizer=gt.SGD(1.0), num_rows=8192)
                    again.push(ids, np.ones((2, 2), np.float32))
        assert running.process.poll() is None
        running.process.terminate()
        _, log = running.process.communicate(timeout=GONE_WITHIN_SECONDS)
        assert running.process.returncode == 0, log


def test_a_role_that_dies_again_and_again_ends_the_cluster() -> None:
    with up("--shards=1") as running:
        parent = psutil.Process(running.process.pid)
        assert running.process.stderr is not None
        for _ in range(MAX_RESTARTS + 1):
            while "serves at" not in running.process.stderr.readline():
                pass
            kill_child(parent, "server")
        _, log = running.process.communicate(timeout=GONE_WITHIN_SECONDS)
        assert running.process.returncode == 1
        assert "ended by itself (killed by SIGKILL) for the 6th time in 10 minutes" in log


def test_a_port_in_use_is_reported_in_words() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with started("--scheduler-listen", address) as process:
            output, log = process.communicate(timeout=60)
    assert process.returncode == 2
    assert output == ""
    (error,) = log.splitlines()  # once, and nothing of gRPC's own
    assert error.startswith(f"error: {address} is in use by process {os.getpid()} (")
    assert "--scheduler-listen 127.0.0.1:0 picks a free port" in error


def test_what_a_role_complains_of_is_said_once() -> None:
    with started("--scheduler-listen=127.0.0.1:0", "--shards=1", "--data=/proc/nope") as process:
        _, log = process.communicate(timeout=60)
    assert process.returncode == 2, log
    assert len([line for line in log.splitlines() if "/proc/nope" in line]) == 1, log


def test_two_clusters_never_share_a_scheduler_port_and_the_second_is_told_of_the_first() -> None:
    with up() as first, started("--scheduler-listen", first.facts["scheduler"]) as second:
        _, log = second.communicate(timeout=60)
        assert second.returncode == 2
        assert cluster_status(first.facts["scheduler"]).ready
    (error,) = log.splitlines()
    assert f"the scheduler of a cluster that runs (process {first.facts['pids']['scheduler']})" in error
    assert f"'geartrain status --scheduler {first.facts['scheduler']}'" in error
    assert "--scheduler-listen 127.0.0.1:0 picks a free port" in error


def test_a_server_of_several_shards_comes_back_with_each_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("scheduler: {num_shards: 4}\nserver: {shards: 2}\n", encoding="utf-8")
    with up("--file", str(path)) as running:
        config = ClientConfig(attempt_timeout_seconds=5, recovery_timeout_seconds=60)
        before = cluster_status(running.facts["scheduler"])
        assert sorted(running.facts["pids"]) == ["scheduler", "server 0", "server 1"]
        assert [shard.shard for shard in before.shards] == [0, 1, 2, 3]
        psutil.Process(running.facts["pids"]["server 1"]).kill()
        assert running.process.stderr is not None
        again = [f"shard {shard} of 4 serves at {before.shards[shard].address}" for shard in (2, 3)]
        for sign in ("server 1 | ended by itself", *again):
            while sign not in (line := running.process.stderr.readline()):
                assert line, "the server did not come back"
        with gt.connect(running.facts["scheduler"], config=config) as cluster:
            after = cluster.status()
            cluster.create_table("t", dim=2, optimizer=gt.SGD(1.0), num_rows=8192).pull(np.arange(8192))
        assert [shard.address for shard in after.shards] == [shard.address for shard in before.shards]
        changed = [
            shard.incarnation != other.incarnation for shard, other in zip(after.shards, before.shards, strict=True)
        ]
        assert changed == [False, False, True, True]
        assert running.process.poll() is None


def test_shards_that_do_not_fit_the_servers_are_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("server: {shards: 2}\n", encoding="utf-8")
    with started("--file", str(path), "--shards=3") as process:
        _, log = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "multiple of server.shards" in log
