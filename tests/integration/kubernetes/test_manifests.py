"""The Helm chart, and what is kept in deploy/kubernetes of it: no cluster is needed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from geartrain.ams.values.config import FOLDER_VARIABLE, ServeConfig
from geartrain.launch.roles import ROLES
from tests.integration.kubernetes.conftest import DEPLOY, MANIFESTS, manifest, objects

CHART = DEPLOY / "helm" / "geartrain"
OBJECTS = [
    pytest.param(found, id=f"{name}-{found['kind']}-{found['metadata']['name']}")
    for name in MANIFESTS
    for found in manifest(name)
]
WORKLOADS = [param for param in OBJECTS if param.values[0]["kind"] in ("StatefulSet", "Deployment", "Job")]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    if (program := shutil.which("helm")) is None:
        pytest.skip("there is no helm here; deploy/kubernetes is looked at instead")
    return subprocess.run([program, *arguments], capture_output=True, text=True, cwd=CHART)


def container_of(workload: dict[str, Any]) -> dict[str, Any]:
    (container,) = workload["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_manifests_are_what_the_chart_renders(name: str) -> None:
    done = helm("template", "geartrain", ".", *MANIFESTS[name])
    assert done.returncode == 0, done.stderr
    assert objects(done.stdout) == manifest(name), "'make manifests' renders them anew"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("server.shard=2", "'shard' not allowed"),
        ("server.shards=0", "minimum: got 0, want 1"),
        ("snapshots.roots={file:///x}", "'file:///x' does not match"),
        ("worker.enabled=true", "wants snapshots.roots"),
        ("worker.name=a_b", "does not match"),
        ("serve.replicas=1", "wants serve.models"),
    ],
)
def test_values_that_cannot_be_are_refused(value: str, said: str) -> None:
    done = helm("template", "geartrain", ".", f"--set={value}")
    assert done.returncode != 0
    assert said in done.stderr


def test_the_chart_is_clean_and_says_how_to_go_on() -> None:
    assert helm("lint", "--strict", ".").returncode == 0
    done = helm("install", "--dry-run=client", "mine", ".")
    assert done.returncode == 0, done.stderr
    assert "create secret generic mine-geartrain-$role --from-file=secrets/$role" in done.stdout
    assert "exec mine-geartrain-scheduler-0 -- geartrain status" in done.stdout


@pytest.mark.parametrize(
    ("roots", "endpoint", "port"),
    [
        ("/snapshots", "", None),
        ("s3://models/runs", "", 443),
        ("s3://models/runs", "http://object-store:9000", 9000),
        ("s3://models/runs", "http://object-store", 80),
    ],
)
def test_pods_call_nobody_but_each_other_names_and_the_object_store(
    roots: str, endpoint: str, port: int | None
) -> None:
    values = [f"--set=snapshots.roots={{{roots}}}", f"--set=snapshots.env.AWS_ENDPOINT_URL={endpoint}"]
    done = helm("template", "mine", ".", *values, "--set=snapshots.claim=mine")
    assert done.returncode == 0, done.stderr
    (policy,) = [found["spec"] for found in objects(done.stdout) if found["kind"] == "NetworkPolicy"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    release, names, *others = policy["egress"]
    assert release == {"to": [{"podSelector": policy["podSelector"]}]}
    assert {entry["port"] for entry in names["ports"]} == {53}
    assert others == ([{"ports": [{"port": port}]}] if port else [])


@pytest.mark.parametrize("found", OBJECTS)
def test_each_object_is_one_of_the_api(found: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="the extra [kube] has the schemas of the API")
    if "monitoring.coreos.com" in found["apiVersion"]:
        pytest.skip("Prometheus Operator brings its own schema")
    for version in ("1.30", "1.34"):
        validate.validate(found, version, strict=True)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_pod_is_told_what_its_role_understands(
    workload: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = container_of(workload)
    names = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
    if workload["kind"] == "Job":
        grace = workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        assert {"--continue", f"--grace={grace}"} <= {*container["command"]}
        assert {"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(grace)} in container["env"]
        return
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    program, role = container["command"]
    assert program == "geartrain"
    flags = [re.sub(r"\$\(\w+\)", "x", flag).partition("=") for flag in container["args"] if flag.startswith("--")]
    given = {key.removeprefix("--").replace("-", "_"): value for key, _, value in flags}
    if any(entry["name"] == "GEARTRAIN_SERVER__SHARD" for entry in container["env"]):
        given["shard"] = "1"
    settings = ROLES[role].settings(**given)
    assert settings.listen == f"0.0.0.0:{names['http' if role == 'serve' else 'grpc']}"
    if isinstance(settings, ServeConfig):
        assert settings.grpc == f"0.0.0.0:{names['grpc']}"
        assert [flag for flag in container["args"] if not flag.startswith("--")] == ["/models/glyphs"]
    if role == "server":
        assert settings.shard == 1
        assert settings.data_port == names["rows"]
        assert (
            workload["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > settings.leave_timeout_seconds + 10
        )
    for probe in ("startupProbe", "readinessProbe"):
        asked = container[probe]["exec"]["command"]
        assert asked[:3] == ["geartrain", "health", settings.listen.replace("0.0.0.0", "127.0.0.1")]
    assert ("livenessProbe" in container) == (role in ("scheduler", "serve")), "a probe that fails would end rows"


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_pod_has_no_more_rights_than_it_needs(workload: dict[str, Any]) -> None:
    pod, container = workload["spec"]["template"]["spec"], container_of(workload)
    assert not pod["automountServiceAccountToken"]
    assert pod["shareProcessNamespace"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["resources"]["limits"]["memory"]
    secrets = [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume]
    role = workload["metadata"]["labels"]["app.kubernetes.io/component"]
    own = {"worker": "geartrain-client"}.get(role, f"geartrain-{role}")
    assert [name for name in secrets if name.startswith("geartrain-")] == [own]
