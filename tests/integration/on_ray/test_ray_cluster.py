"""A cluster on Ray: where its actors are, who gets in, and that nothing is left of it, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import geartrain as gt
from geartrain.ams.values.config import CERTIFIED_ROLES, ClusterConfig, SecurityConfig
from geartrain.launch.certificates import create_authority, issue
from tests.support.command_line import typed
from tests.support.ray_training import STEPS, await_file, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
GONE_SECONDS = 30


def await_end(pids: list[int]) -> None:
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], GONE_SECONDS)
    assert alive == []


@pytest.mark.usefixtures("ray_nodes")
def test_it_gives_back_all_that_it_took() -> None:
    import ray
    from ray.util import placement_group_table

    before = ray.available_resources()["CPU"]
    with gt.ray.cluster(num_shards=2, workers=1) as cluster:
        nodes = {ray.get(cluster.actor(f"server {shard}").node.remote()) for shard in range(2)}
        assert len(nodes) == 2  # spread
        with gt.connect(cluster.address) as connected:
            assert connected.create_table("t", dim=2, optimizer=gt.SGD(0.1)).pull([1]).shape == (1, 2)
        pids = list(cluster.facts.pids.values())
    await_end(pids)
    assert {group["state"] for group in placement_group_table().values()} == {"REMOVED"}
    deadline = time.monotonic() + GONE_SECONDS
    while ray.available_resources()["CPU"] < before:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    cluster.close()  # again


@pytest.mark.usefixtures("ray_nodes")
def test_workers_meet_and_all_begin_again_when_a_rank_dies(tmp_path: Path) -> None:
    folder = str(tmp_path)

    def ranks(address: str) -> tuple[int, float]:
        import torch
        import torch.distributed as dist

        gt.init_process_group("gloo")
        (Path(folder) / f"{os.environ['RANK']}-{os.getpid()}").touch()
        if os.environ["RANK"] == "1" and len(list(Path(folder).glob("1-*"))) == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        total = torch.tensor([float(os.environ["RANK"]) + 1])
        dist.all_reduce(total)
        with gt.connect(address):
            return dist.get_rank(), total.item()

    def mistaken() -> None:
        raise gt.errors.InvalidArgument("no such thing")

    def late() -> str:
        tried = Path(folder) / f"held-{os.environ['RANK']}"
        if not tried.exists():
            tried.touch()
            raise gt.errors.RunHeld("the predecessor still ends")
        return "free"

    with gt.ray.cluster(workers=2, cpus_per_worker=0.5, cpus_per_shard=0.5) as cluster:
        assert cluster.run(ranks, cluster.address) == [(0, 3.0), (1, 3.0)]
        assert len(list(tmp_path.iterdir())) in (3, 4)
        with pytest.raises(gt.errors.InvalidArgument, match="no such thing"):
            cluster.run(mistaken)
        assert cluster.run(late) == ["free", "free"]


@pytest.mark.usefixtures("ray_nodes")
def test_what_cannot_be_is_said() -> None:
    with gt.ray.cluster() as cluster, pytest.raises(gt.errors.ConfigError, match="has no workers"):
        cluster.run(print)
    with pytest.raises(gt.errors.ClusterNotReady, match="Ray has no room for servers"):
        gt.ray.cluster(num_shards=9, timeout_seconds=1)
    with pytest.raises(gt.errors.ConfigError, match="cpus_per_shard 0"):
        gt.ray.cluster(cpus_per_shard=0)
    assert "--address x:1 is of Ray" in typed("up", "--address", "x:1").stderr


@pytest.mark.usefixtures("ray_nodes")
def test_between_machines_nothing_goes_without_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    listed = ray.nodes
    other = {"NodeID": "other", "NodeManagerAddress": "10.9.9.9", "Alive": True}
    monkeypatch.setattr(ray, "nodes", lambda: [*listed(), other])
    with pytest.raises(gt.errors.ConfigError, match=r"Ray has nodes at 10\.9\.9\.9, .*insecure=True"):
        gt.ray.cluster()
    create_authority(tmp_path, "toys")
    for role in CERTIFIED_ROLES:
        issue(tmp_path, tmp_path, [role])
    secured = ClusterConfig(security=SecurityConfig(folder=str(tmp_path)))
    with gt.ray.cluster(config=secured) as cluster:
        assert cluster.address.startswith(f"{ray.util.get_node_ip_address()}:")
        with gt.connect(cluster.address) as connected:
            assert connected.num_shards == 1
        elsewhere = [sys.executable, "-m", "geartrain", "status", "--scheduler", cluster.address]
        stranger = subprocess.run(elsewhere, capture_output=True, text=True, timeout=60, check=False)
        assert stranger.returncode != 0  # it has no certificate: GEARTRAIN_SECURITY__FOLDER is none
    (tmp_path / "server.pem").unlink()
    with pytest.raises(gt.errors.ConfigError, match=r"server 0 on .*: .*server\.pem does not exist"):
        gt.ray.cluster(config=secured)


def test_the_cluster_of_a_program_that_is_killed_ends(ray_nodes: Any, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import json, ray, sys, geartrain as gt\n"
        "ray.init(sys.argv[1], logging_level='ERROR', log_to_driver=False)\n"
        "cluster = gt.ray.cluster()\n"
        "print(json.dumps(cluster.facts.pids), flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, str(program), ray_nodes.address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = json.loads(process.stdout.readline())
        process.kill()
    await_end(list(pids.values()))


def test_a_training_goes_on_when_a_node_is_drained_and_roles_end_with_its_daemon(
    ray_nodes: Any, tmp_path: Path
) -> None:
    import ray

    folders = [tmp_path / "undisturbed", tmp_path / "disturbed"]
    for folder in folders:
        folder.mkdir()
    spare = ray_nodes.add_node(num_cpus=2, object_store_memory=80 << 20)
    with gt.ray.cluster(num_shards=3, workers=1) as cluster:
        (expected,) = cluster.run(train, cluster.address, folders[0], ())
        found: list[float] = []
        run = threading.Thread(target=lambda: found.extend(cluster.run(train, cluster.address, folders[1], [7])))
        run.start()
        await_file(folders[1] / "at-7", 120)
        number = next(n for n in range(3) if ray.get(cluster.actor(f"server {n}").node.remote()) == spare.node_id)
        drain = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", ray_nodes.address]
        drain += ["--node-id", spare.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        drain += ["--reason-message", "test", "--deadline-remaining-seconds", "1"]
        subprocess.run(drain, check=True, timeout=60, capture_output=True)
        ray_nodes.remove_node(spare, allow_graceful=False)  # SIGKILL of its daemon
        await_end([cluster.facts.pids[f"server {number}"]])
        (folders[1] / "go-7").touch()
        run.join(180)
    assert found == [expected]
    assert (folders[1] / f"step-{STEPS}").exists() or sorted(folders[1].glob("step-*"))


def test_up_on_ray_is_ready_and_leaves_nothing(ray_nodes: Any, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "geartrain", "up", "--on=ray", f"--address={ray_nodes.address}", "--json"]
    command += ["--scheduler-listen=127.0.0.1:0", f"--data={tmp_path}", "--graph-listen=127.0.0.1:0"]
    command += ["--metrics=127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            told = json.loads(process.stdout.readline())
            assert set(told["pids"]) == set(told["metrics"]) == {"scheduler", "server 0", "graph"}
            with gt.connect(told["scheduler"]) as connected:
                assert connected.num_shards == 1
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    assert f"ended; kept: snapshots, {tmp_path}/scheduler" in errors
    await_end(list(told["pids"].values()))
