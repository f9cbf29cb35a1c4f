"""The pods of deploy/kubernetes, run: each in a network namespace of its own, as Kubernetes would run it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.kubernetes.conftest import manifest
from tests.support.pods import Pod, Pods, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no pods here: {why_not()}")
SCHEDULER, SERVERS = "geartrain-scheduler-0", ("geartrain-server-0", "geartrain-server-1")


@pytest.fixture
def pods(certificates: dict[str, dict[str, bytes]], tmp_path: Path) -> Iterator[Pods]:
    """Scheduler and servers, ready."""
    for folder in (tmp_path, *tmp_path.parents):  # pods are another user's
        if folder.stat().st_uid == 0 and not folder.stat().st_mode & 1:
            folder.chmod(0o711)
    with Pods(manifest("cluster"), certificates, tmp_path) as cluster:
        for name in (SCHEDULER, *SERVERS):
            cluster.pods[name].start()
        for name in (SCHEDULER, *SERVERS):
            cluster.pods[name].await_ready()
        yield cluster


def status(pods: Pods) -> dict[str, Any]:
    done = pods.pods[SCHEDULER].run(["geartrain", "status", "--scheduler", "127.0.0.1:7000", "--json"])
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def ended(pods: list[Pod]) -> list[int]:
    """Delete pods at once, as an uninstall does; their exit codes."""
    for pod in reversed(pods):
        pod.terminate()
    return [pod.await_end() for pod in pods]


@pytest.mark.timeout(300)
def test_a_shard_comes_back_under_its_name_at_another_address(pods: Pods) -> None:
    before = status(pods)
    assert before["ready"], before
    server = pods.pods[SERVERS[1]]
    lost = server.address
    server.remove()  # with its network: nobody hears of it
    server.start()
    assert server.address != lost
    server.await_ready()
    deadline = time.monotonic() + 60
    while not (now := status(pods))["ready"]:
        assert time.monotonic() < deadline, now
    assert [shard["address"] for shard in now["shards"]] == [shard["address"] for shard in before["shards"]]
    assert now["shards"][1]["incarnation"] > before["shards"][1]["incarnation"]
    assert ended([pods.pods[name] for name in (SCHEDULER, *SERVERS)]) == [0, 0, 0]
