"""The pods of deploy/kubernetes, run: each in a network namespace of its own, as Kubernetes would run it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from geartrain.launch.certificates import create_authority, issue
from tests.integration.jobs.test_classify_and_predict import draw_shapes
from tests.integration.kubernetes.conftest import manifest
from tests.support.command_line import invoke
from tests.support.pods import REPOSITORY, Pod, Pods, why_not
from tests.support.served_models import exported, picture

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no pods here: {why_not()}")
SCHEDULER, SERVERS = "geartrain-scheduler-0", ("geartrain-server-0", "geartrain-server-1")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Where pods keep what they have; they are another user's."""
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 1:
            folder.chmod(0o711)
    return tmp_path


@pytest.fixture
def pods(certificates: dict[str, dict[str, bytes]], state: Path) -> Iterator[Pods]:
    """Scheduler and servers, ready."""
    with Pods(manifest("cluster"), certificates, state) as cluster:
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
@pytest.mark.slow
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
    assert now["shards"][1]["incarnation"] != before["shards"][1]["incarnation"]
    assert ended([pods.pods[name] for name in (SCHEDULER, *SERVERS)]) == [0, 0, 0]


ASK = """
import base64, sys
from geartrain.ams.values.config import identify
from geartrain.serving.http.client import request_json
identify("/certs", "serve")
body = {"images": [base64.b64encode(sys.stdin.buffer.read()).decode()], "k": 1}
print(*(request_json(f"{name}:7000", "POST", "/v1/classify", body)["version"] for name in sys.argv[1:]))
"""


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 3])
def test_a_model_is_asked_of_each_pod_by_another(
    replicas: int, certificates: dict[str, dict[str, bytes]], state: Path
) -> None:
    exported(state / "claim-models" / "glyphs", version=7)
    with Pods(manifest("everything"), certificates, state) as cluster:
        answering = [cluster.pods[f"geartrain-serve-{index}"] for index in range(replicas)]
        for pod in answering:
            pod.start()
        for pod in answering:
            pod.await_ready()
        done = answering[0].run(["python", "-c", ASK, *(pod.name for pod in answering)], stdin=picture(1))
        assert done.stdout.split() == ["7"] * replicas, done.stderr
        assert ended(answering) == [0] * replicas


RECIPE = b"""
{steps: 120, batch_size: 4, width: 8, dim: 16, warmup_steps: 5, held_out: 0.25, sample_rate: 0.75,
 snapshots: {steps: 10}}
"""


@contextmanager
def object_store(pods: Pods) -> Iterator[Path]:
    """What speaks like S3 at ``object-store:9000``, with a bucket; the log of its requests."""
    address, namespace = pods.attach()
    pods.publish(object_store=address)
    into = ["nsenter", f"--net=/run/netns/{namespace}", sys.executable]
    with (pods.state / "object-store.log").open("w") as log:
        serving = subprocess.Popen([*into, "-m", "moto.server", "-H", "0.0.0.0", "-p", "9000"], stdout=log, stderr=log)
    try:
        make = (
            "import s3fs; s3fs.S3FileSystem(endpoint_url='http://127.0.0.1:9000', key='us', secret='s').mkdir('models')"
        )
        soon(lambda: subprocess.run([*into, "-c", make], capture_output=True).returncode == 0)
        yield Path(log.name)
    finally:
        serving.kill()
        serving.wait()


def soon(condition: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_training_of_two_pods_goes_on_after_an_uninstall_and_a_lost_shard(state: Path) -> None:
    pytest.importorskip("moto", reason="the extra [kube] has a stand-in for S3")
    pytest.importorskip("s3fs", reason="the extra [s3] has it")
    create_authority(state / "ca", "shop")
    invoke("certs", "token", "photos*", str(state / "ca"), "--allow", "photos*=read,write,create,snapshot")
    secrets = {
        "photos-token": {"token": next((state / "ca").glob("*.token")).read_bytes()},
        "object-store": {"AWS_ACCESS_KEY_ID": b"us", "AWS_SECRET_ACCESS_KEY": b"s"},
        "recipe": {"recipe.yaml": RECIPE},
    }
    for role in ("scheduler", "server", "client"):
        issue(state / "ca", state / role, [role])
        secrets[f"geartrain-{role}"] = {path.name: path.read_bytes() for path in (state / role).iterdir()}
    draw_shapes(state / "claim-photos", 4)
    with Pods(manifest("everything"), secrets, state) as cluster, object_store(cluster) as requests:
        roles = [cluster.pods[name] for name in (SCHEDULER, *SERVERS)]
        workers = [pod for name, pod in cluster.pods.items() if "photos" in name]
        for pod in (*roles, *workers):  # in no order: workers wait
            pod.start()
        soon(lambda: "step-000000020/" in requests.read_text())
        assert ended([*roles, *workers])[: len(roles)] == [0, 0, 0]
        assert "Saved first: photos-" in (told := roles[1].told()), told
        for pod in (*roles, *workers):
            pod.start()
        soon(lambda: "Going on at step" in workers[0].told())
        already = workers[0].told().count("Going on at step")
        steps = requests.read_text().count("PUT /models/runs/photos/")
        soon(lambda: requests.read_text().count("PUT /models/runs/photos/") > steps + 5)
        roles[2].remove()  # with its network
        roles[2].start()
        for pod in workers:
            assert pod.process is not None
            assert pod.process.wait(300) == 0, pod.told()
        assert workers[0].told().count("Going on at step") > already


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_role_gets_ready_and_ends_in_order(certificates: dict[str, dict[str, bytes]], state: Path) -> None:
    """With metrics, a graph service, slow gears of a module that is mounted, and a service of models."""
    module = REPOSITORY / "examples" / "train_with_slow_gears.py"
    mounted = {"object-store": {}, "modules": {module.name: module.read_bytes()}}
    exported(state / "claim-models" / "glyphs", version=1)
    with Pods(manifest("everything"), certificates | mounted, state) as cluster:
        roles = [pod for name, pod in cluster.pods.items() if "photos" not in name]
        for pod in roles:
            pod.start()
        for pod in roles:
            pod.await_ready(240)
        assert ended(roles) == [0] * len(roles)
