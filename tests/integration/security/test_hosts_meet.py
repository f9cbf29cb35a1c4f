"""torchrun's agents of two machines meet by a scheduler that looks at certificates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from geartrain.ams.client.jobs.rendezvous import RendezvousValues
from geartrain.ams.scheduler.service import SchedulerServer
from geartrain.ams.values.config import (
    CLIENT,
    FOLDER_VARIABLE,
    NO_FOLDER,
    ClientConfig,
    SchedulerConfig,
    identify,
    identity,
)
from geartrain.ams.values.errors import AccessDenied, ConfigError, SchedulerUnavailable
from geartrain.launch.certificates import create_authority, issue
from tests.support.refused_address import refused_address
from tests.unit.test_imports import REPOSITORY

IMPATIENT = ClientConfig(recovery_timeout_seconds=0.0)


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[str]:
    """The address of one; this process is it."""
    before = identity("127.0.0.1:1")
    create_authority(tmp_path, "test")
    for role in ("scheduler", "graph", CLIENT):
        issue(tmp_path, tmp_path, [role])
    identify(str(tmp_path), "scheduler")
    server = SchedulerServer(SchedulerConfig(listen="127.0.0.1:0", num_shards=1))
    yield server.start()
    server.stop(0)
    identify(*before)


def host(scheduler: str, address: str, folder: Path, breaks: int) -> subprocess.Popen[str]:
    script = Path(__file__).with_name("rendezvous_host.py")
    return subprocess.Popen(
        [sys.executable, str(script), scheduler, "search-ranks", address, "2", str(breaks)],
        env={
            **os.environ,
            FOLDER_VARIABLE: str(folder),
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(REPOSITORY),
            "INSECURE": "0",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("breaks", [1, 0])
def test_two_machines_meet_under_certificates_and_again_after_a_rank_was_killed(
    breaks: int, scheduler: str, tmp_path: Path
) -> None:
    hosts = [host(scheduler, address, tmp_path, breaks) for address in ("127.0.0.2", "127.0.0.3")]
    try:
        outcomes = [process.communicate(timeout=200) for process in hosts]
    finally:
        for process in hosts:
            process.kill()
    for number, (told, log) in enumerate(outcomes):
        assert told, log
        rank, machine, starts, gradient, agree = json.loads(told.splitlines()[-1])[
            str(number)
        ]  # gloo of torch 2.10 speaks, too
        # Its rank and number are those of its address; gradients are of both ranks.
        assert (rank, machine, gradient, agree) == (number, number, 1.0, True), (told, log)
        # A machine that hears of the others first does not count its start, and one may be started once more.
        assert starts >= (number == breaks), (starts, log)


def test_who_has_no_certificate_of_a_worker_meets_nobody(scheduler: str, tmp_path: Path) -> None:
    identify(str(tmp_path), CLIENT)
    mine = RendezvousValues(scheduler, "job", IMPATIENT)
    assert mine.write("key", b"value")[1]
    assert [found.value for found in mine.read(["key", "other"])] == [b"value", None]
    mine.close()
    foreign = tmp_path / "foreign"
    create_authority(foreign, "test")
    issue(foreign, foreign, [CLIENT])
    for folder, role, refusal in (
        (NO_FOLDER, CLIENT, SchedulerUnavailable),
        (str(foreign), CLIENT, SchedulerUnavailable),
        (str(tmp_path), "graph", AccessDenied),
    ):
        identify(folder, role)
        stranger = RendezvousValues(scheduler, "job", IMPATIENT)
        with pytest.raises(refusal):
            stranger.read(["key"])
        stranger.close()


def test_an_agent_says_what_its_endpoint_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    points = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["entry-points"]["torchrun.handlers"]
    module, function = points["geartrain"].split(":")
    make = getattr(import_module(module), function)()
    with pytest.raises(ConfigError, match=r"10\.0\.0\.1"):
        make(RendezvousParameters("geartrain", "10.0.0.1", "job", 1, 2))
    with refused_address() as address:
        agent = make(RendezvousParameters("geartrain", address, "job", 1, 2))
        assert agent.get_backend() == "geartrain" and agent.settings.max_nodes == 2
        agent._shared._values._config = IMPATIENT
        assert agent.num_nodes_waiting() == 0  # ranks train on
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
