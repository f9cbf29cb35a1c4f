"""Pods of manifests as processes of this machine: what a kubelet makes of a pod's spec, without a cluster.

Each pod has a network namespace of its own with an address of its own, and a root that is read-only but for its
volumes; it runs as the user, with the groups and without the capabilities that its spec says, and sees the commands,
arguments, environment, Secrets (as a kubelet lays them out) and names that it would see. Names are those of headless
Services, in a file that all pods have as /etc/hosts. Needs root.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
_NEEDED = (Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), REPOSITORY)
_KEPT = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "OMP_WAIT_POLICY")
_INHERITED = {key: os.environ[key] for key in _KEPT if key in os.environ} | {"OMP_NUM_THREADS": "1"}
_ROOT = """
set -e
mount -t tmpfs -o mode=0755 tmpfs {root}
for from in /*; do
  at={root}$from
  if [ -L "$from" ]; then cp -P "$from" "$at"
  elif [ "$from" = /tmp ] || [ ! -d "$from" ]; then :
  else mkdir "$at"; [ {closed} ] || mount --rbind "$from" "$at"; fi
done
for file in hosts passwd resolv.conf; do mount --bind {state}/$file {root}/etc/$file; done
mkdir -p {root}/dev/shm && mount -t tmpfs -o size=64m,mode=1777 tmpfs {root}/dev/shm
{mounts}
for path in {needed}; do [ -e {root}$path ] || {{ mkdir -p {root}$path; mount --bind $path {root}$path; }}; done
for at in "" {top}; do mount -o remount,bind,ro {root}$at; done
exec chroot {root} {as_user} {command}
"""


def why_not() -> str:
    """Why pods cannot be run here; "" if they can."""
    if os.geteuid() != 0:
        return "pods need root, for namespaces"
    if missing := [name for name in ("ip", "nsenter", "setpriv") if shutil.which(name) is None]:
        return f"pods need {', '.join(missing)} (iproute2, util-linux)"
    tried = subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], capture_output=True, text=True)
    return tried.stderr.strip()


class Pod:
    """One pod of a workload; it has a name, an index and, while it runs, an address."""

    def __init__(self, cluster: Pods, template: dict[str, Any], name: str, index: int, service: str) -> None:
        self.name, self.index, self.service = name, index, service
        self.spec, self.labels = template["spec"], template["metadata"]["labels"]
        (self.container,) = self.spec["containers"]
        self.address = ""
        self.process: subprocess.Popen[bytes] | None = None
        self._cluster = cluster
        self._namespace = ""
        self._life = itertools.count(1)
        self.log = cluster.state / f"{name}.log"

    def start(self) -> None:
        """Run it, at an address that no pod had before."""
        folder = self._cluster.state / f"{self.name}-{next(self._life)}"  # what is in an emptyDir goes with the pod
        folder.mkdir()
        self.address, self._namespace = self._cluster.attach()
        self._cluster.publish()
        mounts = []
        for mount in self.container["volumeMounts"]:
            (volume,) = (
                (volume for volume in self.spec["volumes"] if volume["name"] == mount["name"])
                if (mount["name"] in {volume["name"] for volume in self.spec["volumes"]})
                else ({"name": mount["name"], "persistentVolumeClaim": {"claimName": f"{mount['name']}-{self.name}"}},)
            )
            at, source = f"{folder}/root{mount['mountPath']}", self._volume(folder, volume)
            mounts.append(f"mkdir -p {at} && mount --bind {source} {at}")
            if mount.get("readOnly"):
                mounts.append(f"mount -o remount,bind,ro {at}")
        (folder / "root").mkdir()
        closed = [parent for path in _NEEDED for parent in path.parents if not parent.stat().st_mode & 1]
        tops = {Path("/", path.parts[1]) for path in closed}
        script = _ROOT.format(
            root=folder / "root",
            state=self._cluster.state,
            closed=" -o ".join([f'"$from" = {top}' for top in tops] or ["1 = 2"]),
            needed=" ".join(map(str, sorted(_NEEDED))),  # a folder before what is in it
            mounts="\n".join(mounts),
            top=" ".join(
                f"/{path.name}"
                for path in Path("/").iterdir()
                if path.is_dir()
                and not path.is_symlink()
                and path not in tops
                and path.name not in ("proc", "sys", "dev", "tmp", "run")
            ),
            as_user=shlex.join(self._as_user()),
            command=shlex.join(self._expanded([*self.container["command"], *self.container.get("args", [])])),
        )
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    "nsenter",
                    f"--net=/run/netns/{self._namespace}",
                    "unshare",
                    "--mount",
                    "--uts",
                    "sh",
                    "-c",
                    f"hostname {self.name}\n{script}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def run(
        self, command: list[str], timeout_seconds: float = 60.0, stdin: bytes = b""
    ) -> subprocess.CompletedProcess[str]:
        """As ``kubectl exec``, and as probes and hooks are run."""
        assert self.process is not None
        into = ["nsenter", f"--target={self.process.pid}", "--net", "--mount", "--uts", "--root", "--wdns=/"]
        words = [*into, *self._as_user(), *self._expanded(command)]
        done = subprocess.run(words, capture_output=True, input=stdin, timeout=timeout_seconds)
        return subprocess.CompletedProcess(words, done.returncode, done.stdout.decode(), done.stderr.decode())

    def probe(self, kind: str) -> bool:
        """Run its ``startupProbe`` or ``readinessProbe`` once."""
        probe = self.container[kind]
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.run(probe["exec"]["command"], probe["timeoutSeconds"] * 3).returncode == 0
        return False

    def await_ready(self, timeout_seconds: float = 120.0) -> None:
        """Ask its probes until it has started and is ready."""
        assert self.process is not None
        deadline = time.monotonic() + timeout_seconds
        for kind in ("startupProbe", "readinessProbe"):
            while not self.probe(kind):
                assert self.process.poll() is None, self.told()
                assert time.monotonic() < deadline, f"{self.name}: {kind} fails\n{self.told()}"

    def terminate(self) -> None:
        """Its preStop hook, then SIGTERM: as a pod that is deleted."""
        assert self.process is not None
        if hook := self.container.get("lifecycle", {}).get("preStop"):
            assert self.run(hook["exec"]["command"]).returncode == 0
        self.process.send_signal(signal.SIGTERM)

    def await_end(self) -> int:
        """Return its exit code, within its grace; after it, it is gone with its address."""
        assert self.process is not None
        code = self.process.wait(self.spec["terminationGracePeriodSeconds"])
        self.remove()
        return code

    def remove(self) -> None:
        """Kill it, and take its network away at once: nobody hears from it again."""
        if self._namespace:
            self._cluster.detach(self._namespace)
            self._namespace = self.address = ""
            self._cluster.publish()
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def told(self) -> str:
        """What it logged, in all its lives."""
        return self.log.read_text(errors="replace")

    def _as_user(self) -> list[str]:
        user, own = self.spec["securityContext"], self.container["securityContext"]
        assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"]
        return [
            "setpriv", f"--reuid={user['runAsUser']}", f"--regid={user['runAsGroup']}", f"--groups={user['fsGroup']}",
            *(f"--{kind}=-all" for kind in ("bounding-set", "inh-caps") if own["capabilities"]["drop"] == ["ALL"]),
            "--no-new-privs", "env", "-i", *(f"{key}={value}" for key, value in self._environment().items()),
        ]  # fmt: skip

    def _environment(self) -> dict[str, str]:
        found = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": "/home/geartrain", **_INHERITED}
        for source in self.container.get("envFrom", ()):
            found |= {key: text.decode() for key, text in self._cluster.secrets[source["secretRef"]["name"]].items()}
        known = {
            "metadata.name": self.name,
            "metadata.namespace": self._cluster.namespace,
            "metadata.labels['apps.kubernetes.io/pod-index']": str(self.index),
        }
        for entry in self.container.get("env", ()):
            value = entry.get("value")
            found[entry["name"]] = value if value is not None else known[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        return found

    def _expanded(self, words: list[str]) -> list[str]:
        known = self._environment()
        return [re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], word) for word in words]

    def _volume(self, folder: Path, volume: dict[str, Any]) -> Path:
        at = folder / f"volume-{volume['name']}"
        group = self.spec["securityContext"]["fsGroup"]
        if claim := volume.get("persistentVolumeClaim"):
            at = self._cluster.state / f"claim-{claim['claimName']}"
        at.mkdir(exist_ok=True)
        os.chown(at, 0, group)
        at.chmod(0o2775)
        if (of := volume.get("secret") or volume.get("configMap")) is not None:
            name = of.get("secretName") or of["name"]
            lay_out(at, self._cluster.secrets[name], of.get("defaultMode", 0o644), group)
        return at


def lay_out(at: Path, files: dict[str, bytes], mode: int, group: int) -> None:
    """As a kubelet does: real files in a folder of their time, ``..data`` links to it, and files link through that;
    with fsGroup they are root's and may be read by that group, whatever ``defaultMode`` says."""
    real = at / f"..{time.time_ns()}"
    real.mkdir()
    for name, content in files.items():
        (real / name).write_bytes(content)
        (real / name).chmod(mode | 0o440)
        os.chown(real / name, 0, group)
        if not (at / name).is_symlink():
            (at / name).symlink_to(f"..data/{name}")
    (at / "..new").symlink_to(real.name)
    before = (at / "..data").resolve() if (at / "..data").is_symlink() else None
    (at / "..new").rename(at / "..data")
    if before is not None:
        shutil.rmtree(before)


class Pods:
    """The pods of manifests, by name, on a network of their own; a context that ends them all."""

    def __init__(self, documents: list[dict[str, Any]], secrets: dict[str, dict[str, bytes]], state: Path) -> None:
        """``secrets`` are Secrets and ConfigMaps; ``state`` is a folder for logs and volumes."""
        self.namespace, self.secrets, self.state = "default", secrets, state
        self._next = itertools.count(2)
        self._network = f"gt{os.getpid()}"
        self._attached: set[str] = set()
        self._others: dict[str, str] = {}
        self.pods: dict[str, Pod] = {}
        for found in documents:
            spec, name = found.get("spec", {}), found["metadata"]["name"]
            if found["kind"] in ("StatefulSet", "Deployment", "Job"):
                for index in range(spec["completions"] if found["kind"] == "Job" else spec["replicas"]):
                    pod = Pod(self, spec["template"], f"{name}-{index}", index, spec.get("serviceName", ""))
                    self.pods[pod.name] = pod
        (state / "hosts").write_text("")
        (state / "resolv.conf").write_text("")
        (state / "passwd").write_text("root:x:0:0::/root:/bin/sh\ngeartrain:x:1000:1000::/home/geartrain:/bin/sh\n")

    def __enter__(self) -> Pods:
        self._ip("netns", "add", self._network)
        self._ip("-n", self._network, "link", "add", "pods", "type", "bridge")
        self._ip("-n", self._network, "link", "set", "pods", "up")
        return self

    def __exit__(self, *_: object) -> None:
        for pod in self.pods.values():
            pod.remove()
        for namespace in (*self._attached, self._network):
            self._ip("netns", "del", namespace)

    def attach(self) -> tuple[str, str]:
        """A new address, and the network namespace that has it."""
        number = next(self._next)
        address, namespace, cable = f"10.244.{number // 250}.{number % 250}", f"{self._network}-{number}", f"p{number}"
        self._ip("netns", "add", namespace)
        self._attached.add(namespace)
        self._ip("-n", self._network, "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        self._ip("-n", self._network, "link", "set", cable, "master", "pods", "up")
        self._ip("-n", namespace, "addr", "add", f"{address}/16", "dev", "eth0")
        for device in ("lo", "eth0"):
            self._ip("-n", namespace, "link", "set", device, "up")
        return address, namespace

    def detach(self, namespace: str) -> None:
        """Pull its cable: what is sent there is lost, and nobody says so."""
        self._ip("-n", self._network, "link", "del", f"p{namespace.rpartition('-')[2]}")
        self._ip("netns", "del", namespace)
        self._attached.remove(namespace)

    def publish(self, **others: str) -> None:
        """Tell all pods under which names the others are to be had, as headless Services do."""
        lines = ["127.0.0.1 localhost"]
        for pod in self.pods.values():
            if pod.address:
                names = [pod.name]
                if pod.service:
                    names += [f"{pod.name}.{pod.service}", f"{pod.name}.{pod.service}.{self.namespace}.svc"]
                    if pod.index == 0:
                        names += [pod.service, f"{pod.service}.{self.namespace}.svc"]
                lines.append(f"{pod.address} {' '.join(names)}")
        self._others |= others
        lines += [f"{address} {name.replace('_', '-')}" for name, address in self._others.items()]
        (self.state / "hosts").write_text("\n".join(lines) + "\n")  # the same file: pods have it mounted

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)
