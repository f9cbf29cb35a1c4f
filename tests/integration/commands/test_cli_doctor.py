"""``geartrain doctor`` on a machine whose faults are real: a taken port, a full disk, a cluster that is not whole."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import geartrain as gt
from geartrain.ams.client import cluster_status as ams_cluster_status
from geartrain.ams.client.factory import local
from geartrain.ams.observe.failpoints import VARIABLE
from geartrain.ams.server.data_plane import DataPlanePort
from geartrain.ams.server.shard import Shard
from geartrain.ams.values.config import ClusterConfig, SchedulerConfig
from geartrain.launch import doctor
from tests.integration.commands.test_cli import role
from tests.support.command_line import typed

CHECKS = {
    *(
        "versions",
        "core",
        "gpu",
        "scheduler port",
        "server port",
        "graph port",
        "slowgear port",
        "serve port",
        "cluster",
        "disk",
        "fsync",
        "open files",
    ),
    *("shared memory", "huge pages", "machine", "cpus", "failpoints"),
}


@pytest.fixture(autouse=True)
def free_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let roles have any free port: one that listens at a default of theirs is none of these tests' business."""
    for name in ("GRAPH", "SERVE"):
        monkeypatch.setenv(f"GEARTRAIN_{name}__LISTEN", "127.0.0.1:0")


def findings(*arguments: str, code: int) -> dict[str, dict[str, Any]]:
    done = typed("doctor", "--json", "--disk-gib=0", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["ok"] == (code == 0)
    return {finding["check"]: finding for finding in report["findings"]}


def free_address() -> str:
    """An address of which no other test takes the port: the rest of the suite has those of 127.0.0.1."""
    with closing(socket.create_server(("127.0.0.2", 0))) as free:
        return f"127.0.0.2:{free.getsockname()[1]}"


def test_a_machine_without_a_fault_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEARTRAIN_SCHEDULER__LISTEN", free_address())
    found = findings("--folder", str(tmp_path / "not" / "yet"), code=0)
    assert set(found) == CHECKS
    assert str(tmp_path) in found["disk"]["found"]
    assert "p99" in found["fsync"]["found"]
    assert all(bool(finding["remedy"]) == (finding["state"] != "ok") for finding in found.values())
    assert list(tmp_path.iterdir()) == []


def test_a_taken_port_is_a_fault_that_names_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("GEARTRAIN_SCHEDULER__LISTEN", address)
        found = findings(code=1)["scheduler port"]
        text = typed("doctor", "--disk-gib=0")
    assert (found["state"], f"process {os.getpid()} (" in found["found"]) == ("fail", True)
    assert text.returncode == 1
    assert f"fail  scheduler port  {address}: process {os.getpid()}" in text.stdout
    assert "-> end that process, or choose another address" in text.stdout


def test_a_running_cluster_is_looked_at_and_its_clocks_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    with role("scheduler", "--listen=127.0.0.1:0") as scheduler:
        address = scheduler["address"]
        monkeypatch.setenv("GEARTRAIN_SCHEDULER__LISTEN", address)
        absent = findings("--scheduler", address, code=1)
        assert "shard 0 is missing" in absent["cluster"]["found"]
        assert (
            f"a scheduler of Geartrain serves there (process {scheduler['pid']})" in absent["scheduler port"]["found"]
        )
        with role("server", "--scheduler", address):
            found = findings("--scheduler", address, code=0)
    assert "1 shard, version 1, all up" in found["cluster"]["found"]
    assert (found["clock"]["state"], "that of shard 0 is 0." in found["clock"]["found"]) == ("ok", True)


def test_shards_of_a_process_work_on_cpus_of_their_own() -> None:
    first, second, *_ = (*sorted(os.sched_getaffinity(0)), None)
    if second is None:
        pytest.skip("needs two CPUs")
    with role("scheduler", "--listen=127.0.0.1:0", "--num-shards=2") as scheduler:
        address = scheduler["address"]
        cpus = f"{first},{second}"
        with role("server", "--shards=2", "--scheduler", address, "--cpus", cpus, "--memory-node=0") as server:
            pid = server["pid"]
            with gt.connect(address) as cluster:
                cluster.create_table("t", dim=1, optimizer=gt.SGD(1.0)).pull(np.arange(64))
                found = doctor.check_cpus().found
            memory = Path(f"/proc/{pid}/numa_maps").read_text()
    assert re.search(rf"on {first} \(process [^)]*\b{pid}\b", found), found
    assert re.search(rf"on {second} \(process [^)]*\b{pid}\b", found), found
    assert "prefer:0" in memory


def test_two_shards_bound_to_one_cpu_are_a_warning() -> None:
    one = max(os.sched_getaffinity(0))
    ports = [DataPlanePort(lambda: Shard(0, np.arange(4096), incarnation=1), "", 0, cpus=[one]) for _ in range(2)]
    for port in ports:
        port.offer()
    found = doctor.check_cpus()
    for port in ports:
        port.close()
    assert (found.state, f"shards on {one} (process {os.getpid()}" in found.found) == ("warn", True), found
    assert "--cpus" in found.remedy


def test_a_cluster_that_does_not_answer_is_a_fault() -> None:
    found = findings("--scheduler", free_address(), code=1)["cluster"]
    assert "connection refused" in found["found"]
    assert "geartrain up" in found["remedy"]


def test_a_table_that_lost_rows_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with local(1) as cluster:
        status = replace(cluster.status(), incomplete_tables=("faces",))
        monkeypatch.setattr(ams_cluster_status, "cluster_status", lambda *_, **__: status)
        found = next(iter(doctor.check_cluster("anywhere:1")))
    assert (found.state, "'faces'" in found.found, "table drop" in (found.remedy or "")) == ("warn", True, True)


def test_a_clock_that_is_off_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with local(2) as cluster:
        status = cluster.status()
        assert all(abs(shard.clock_ahead_seconds or 9) < 1 for shard in status.shards)
        shards = (status.shards[0], replace(status.shards[1], clock_ahead_seconds=-90.0))
        monkeypatch.setattr(ams_cluster_status, "cluster_status", lambda *_, **__: replace(status, shards=shards))
        clock = list(doctor.check_cluster("anywhere:1"))[-1]
    assert (clock.state, clock.found) == ("warn", "that of shard 1 is 90.000 s behind ours")


def test_too_little_disk_is_a_fault(tmp_path: Path) -> None:
    disk, _ = doctor.check_disk(tmp_path, disk_gib=1e9)
    assert (disk.state, "--disk-gib" in disk.remedy) == ("fail", True)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)], capture_output=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")
    try:
        (tmp_path / "data").write_bytes(bytes(60 << 10))
        yield tmp_path
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_is_a_fault(full_disk: Path) -> None:
    disk, sync = doctor.check_disk(full_disk, disk_gib=0.001)
    assert (disk.state, disk.found.startswith("0.0 GiB free")) == ("fail", True)
    assert (sync.state, "No space left" in sync.found) == ("fail", True)


def test_a_folder_that_cannot_be_written_is_a_fault() -> None:
    _, sync = doctor.check_disk(Path("/proc/self"), disk_gib=0)
    assert sync.state == "fail"


def test_armed_failpoints_are_a_warning() -> None:
    finding = doctor.check_failpoints({VARIABLE: "thaw.before=kill"})
    assert (finding.state, "unset" in finding.remedy) == ("warn", True)


def test_a_package_that_is_too_old_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        doctor.importlib.metadata, "requires", lambda _: ["numpy>=99", "nothing_like_it", "x; extra == 'dev'"]
    )
    versions = doctor.check_versions()
    assert versions.state == "fail"
    assert "numpy is " in versions.found and "not >=99" in versions.found
    assert "nothing_like_it is missing" in versions.found
    assert "x is" not in versions.found


def test_a_port_of_another_machine_is_no_port_of_ours() -> None:
    config = ClusterConfig(scheduler=SchedulerConfig(listen="192.0.2.1:7000", insecure=True))
    finding = doctor.check_port("scheduler port", config.scheduler.listen)
    assert (finding.state, "cannot assign requested address" in finding.found) == ("fail", True)
