"""The registry of roles: a role that is entered there is known to every command, and nowhere else has to be named."""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from geartrain.ams.rpc.ping import PingHandler
from geartrain.ams.rpc.server.binding import bind
from geartrain.ams.rpc.server.server import GrpcServer
from geartrain.ams.rpc.services import GRAPH
from geartrain.ams.scheduler.service import SchedulerServer
from geartrain.ams.values.config import ClusterConfig, RoleConfig, SchedulerConfig
from geartrain.ams.values.rpc import Pong
from geartrain.launch import role as life
from geartrain.launch import up
from geartrain.launch.roles import ROLES, Report, RoleKind, Started
from tests.support.command_line import typed

REPOSITORY = Path(__file__).resolve().parents[3]


class ToyConfig(RoleConfig):
    """A role that does nothing."""

    colour: str = "red"
    """What it looks like."""


class ToyServer:
    stop_reason = None

    def __init__(self, listen: str) -> None:
        self._server = GrpcServer(listen, 4 << 20, reflection=False)
        self._server.add(bind(GRAPH, dict.fromkeys((kind for kind, _ in GRAPH.items()), PingHandler("toy"))))
        self._server.start()
        self._server.ready()
        self.address = self._server.address
        self._ended = threading.Event()

    def wait(self) -> object:
        return self._ended.wait()

    def stop(self, grace_seconds: float) -> None:
        self._server.stop(grace_seconds)
        self._ended.set()


def start_toy(config: Any) -> Started:
    server = ToyServer(config.toy.listen)
    return server, {"address": server.address, "colour": config.toy.colour}


def report_of_toy(config: Any) -> Report:
    def show(pongs: Mapping[str, Pong]) -> None:
        print(f"toy of process {pongs[config.toy.listen].pid}")

    return Report(addresses={config.toy.listen: "toy"}, facts={"toy": config.toy.colour}, show=show)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ToyServer]:
    """A toy that serves, of a role that nothing knows but the registry."""
    role = RoleKind(
        name="toy",
        title="toy",
        settings=ToyConfig,
        service="geartrain.ams.rpc.services:GRAPH",
        start=start_toy,
        help="Run a toy.",
        in_up=True,
        report=f"{__name__}:report_of_toy",
    )
    monkeypatch.setitem(ROLES, "toy", role)
    server = ToyServer("127.0.0.1:0")
    monkeypatch.setenv("GEARTRAIN_TOY__LISTEN", server.address)
    yield server
    server.stop(0)


def test_it_has_a_command_with_a_flag_for_every_setting(toy: ToyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert " toy " in typed("--help").stdout
    assert "What it looks like." in typed("toy", "--help").stdout
    monkeypatch.setattr(life, "serve", lambda name, service, **facts: (service.stop(0), print(name, facts["colour"])))
    assert typed("toy", "--listen=127.0.0.1:0", "--colour=blue").stdout == "toy blue\n"
    taken = typed("toy", "--listen", toy.address)
    assert taken.returncode == 2
    assert f"{toy.address} is in use by a toy of Geartrain (process {os.getpid()})" in taken.stderr


@pytest.mark.usefixtures("toy")
def test_its_settings_are_a_section_of_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("toy:\n  colour: green\n", encoding="utf-8")
    assert yaml.safe_load(typed("config", "show", "-f", str(file)).stdout)["toy"]["colour"] == "green"
    file.write_text("toy:\n  color: green\n", encoding="utf-8")
    assert "did you mean 'colour'?" in typed("config", "validate", str(file)).stderr


class PretendedChild:
    """A child that is ready as soon as it is started."""

    started: queue.SimpleQueue[Sequence[str]] = queue.SimpleQueue()

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        *,
        on_ready: Callable[[Any], None],
        **_: object,
    ) -> None:
        self.name, self.arguments, self.pid = name, arguments, 1
        self.facts = {"address": f"{name}:1", "addresses": [f"{name}:1"]}
        self.started.put([*arguments, environ["GEARTRAIN_TOY__COLOUR"]])
        on_ready(self)

    def terminate(self) -> None: ...

    def stop(self, _: float) -> bool:
        return False


@pytest.mark.usefixtures("toy")
def test_up_starts_it_with_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(up, "Child", PretendedChild)
    monkeypatch.setattr(up.Launcher, "wait", lambda *_, **__: None)
    monkeypatch.setenv("GEARTRAIN_TOY__COLOUR", "blue")
    listens = ["--toy-listen=127.0.0.1:0", "--scheduler-listen=127.0.0.1:0"]
    told = json.loads(typed("up", "--json", *listens).stdout)
    assert (told["toy"], told["graph"], set(told["pids"])) == ("toy:1", None, {"scheduler", "server 0", "toy"})
    starts = [PretendedChild.started.get_nowait() for _ in range(3)]
    assert starts[-1] == ["toy", "--scheduler=scheduler:1", "blue"]
    assert " · toy toy:1 (pid 1)" in typed("up", "--toy", *listens[1:], "--toy-listen=127.0.0.1:0").stdout


def test_status_and_doctor_see_it(toy: ToyServer) -> None:
    scheduler = SchedulerServer(SchedulerConfig(listen="127.0.0.1:0"))
    address = scheduler.start()
    try:
        told = json.loads(typed("status", "--scheduler", address, "--json").stdout)
        assert told["toy"] == "red"
        assert {found["role"]: found["address"] for found in told["roles"]} == {
            "scheduler": address,
            "toy": toy.address,
        }
        assert f"toy of process {os.getpid()}\n" in typed("status", "--scheduler", address).stdout
    finally:
        scheduler.stop(0)
    findings = json.loads(typed("doctor", "--json", "--disk-gib=0").stdout)["findings"]
    (port,) = (finding["found"] for finding in findings if finding["check"] == "toy port")
    assert port == f"{toy.address}: a toy of Geartrain serves there (process {os.getpid()})"


def test_every_role_has_a_service_of_compose_a_launch_script_and_a_typed_section() -> None:
    services = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text(encoding="utf-8"))["services"].values()
    ours = [service for service in services if service["image"] == "geartrain" and "entrypoint" not in service]
    assert {service["command"][0] for service in ours} == set(ROLES)
    assert [service["command"] for service in ours if "healthcheck" not in service] == []
    assert {name for name in ROLES if not (REPOSITORY / f"scripts/launch_{name}.sh").is_file()} == set()
    assert {name: role.settings for name, role in ROLES.items()} == {
        name: field.annotation for name, field in ClusterConfig.model_fields.items() if name in ROLES
    }
