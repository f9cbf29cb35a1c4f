"""Builds of Geartrain that do not understand each other are told so where they meet; those that do work together."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version as release
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import geartrain as gt
from geartrain.ams.pb.v1.wire import WIRE
from geartrain.ams.rpc.client.scheduler import GrpcSchedulerCarrier
from geartrain.ams.values.errors import VersionMismatch
from geartrain.ams.values.rpc import version
from geartrain.ams.values.scheduler_messages import Register
from tests.integration.conftest import QUICK, ServedCluster
from tests.support.command_line import typed
from tests.support.role_process import RoleProcess

OLD = "0.1.0+0ldb111d"
REMEDY = "Start all roles with one version of Geartrain: 'geartrain --version' names that of each machine"


def build(folder: Path, wire: str = WIRE) -> dict[str, str]:
    """The environment of a process whose Geartrain is another build, of this wire."""
    (folder / "sitecustomize.py").write_text(
        f"from geartrain.ams.pb.v1 import wire\nwire.WIRE = {wire!r}\n"
        f"from geartrain.ams.values import rpc\nrpc.version = lambda: {OLD!r}\n"
    )
    return {"PYTHONPATH": str(folder)}


def refused(*command: str, **environment: str) -> str:
    """What a command says, in one line, that ends with an error."""
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=60, env={**os.environ, **environment}
    )
    assert done.returncode != 0, done.stdout
    return done.stderr


def typed_in(address: str, line: str, environment: dict[str, str]) -> str:
    """What a program of another build prints that runs one line with the cluster at ``address``."""
    program = f"import numpy as np, geartrain as gt\nwith gt.connect({address!r}) as cluster: {line}"
    command = [sys.executable, "-c", program]
    return subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=60, env={**os.environ, **environment}, check=True
    ).stdout


@pytest.fixture
def scheduler() -> Iterator[RoleProcess]:
    with RoleProcess("scheduler", "--listen", "127.0.0.1:0", "--num-shards", "1") as started:
        yield started


def test_a_server_of_another_wire_is_refused_when_it_joins(scheduler: RoleProcess, tmp_path: Path) -> None:
    where = ("-m", "geartrain", "server", "--listen", "127.0.0.1:0", "--scheduler", scheduler.address)
    said = refused(*where, **build(tmp_path, "deadbeef"))
    assert f"is Geartrain '{OLD}' of wire 'deadbeef', and the scheduler is '{version()}' of wire '{WIRE}'" in said
    assert REMEDY in said
    (shard,) = json.loads(typed("status", "--scheduler", scheduler.address, "--json").stdout)["shards"]
    assert shard["state"] == "missing"


def test_a_server_that_names_no_wire_is_refused_as_an_older_one(scheduler: RoleProcess) -> None:
    calls = GrpcSchedulerCarrier(scheduler.address)
    with pytest.raises(VersionMismatch, match="'h:1' is Geartrain of an older version, no wire, and the scheduler is"):
        calls.call(Register(address="h:1", shard=0, incarnation=1), 10.0)
    calls.close()


def test_a_client_is_told_that_the_cluster_is_of_another_wire(
    served: Callable[..., ServedCluster], tmp_path: Path
) -> None:
    where = f"import geartrain as gt; gt.connect({served(1).address!r})"
    said = refused("-c", where, **build(tmp_path, "deadbeef")).splitlines()[-1]
    assert f"is Geartrain '{version()}' of wire '{WIRE}', and this process is '{OLD}' of wire 'deadbeef'" in said
    assert "VersionMismatch" in said and REMEDY in said


def test_builds_of_one_wire_work_together_and_status_shows_both(scheduler: RoleProcess, tmp_path: Path) -> None:
    where = ("--listen", "127.0.0.1:0", "--scheduler", scheduler.address)
    with (
        RoleProcess("server", *where, **build(tmp_path)) as server,
        gt.connect(scheduler.address, config=QUICK) as cluster,
    ):
        table = cluster.create_table("t", dim=2, optimizer=gt.SGD(1.0), initializer=gt.Constant(0.5))
        assert table.pull(np.arange(2)).tolist() == [[0.5, 0.5], [0.5, 0.5]]
        told = json.loads(typed("status", "--scheduler", scheduler.address, "--json").stdout)
        builds = {role["address"]: role["version"] for role in told["roles"]}
        assert builds == {scheduler.address: version(), server.address: OLD}
        shown = typed("status", "--scheduler", scheduler.address).stdout
        assert f"version {version()}, up" in shown and OLD in shown


def test_a_shard_hears_why_when_a_scheduler_of_another_wire_takes_over_and_keeps_its_rows(tmp_path: Path) -> None:
    old = build(tmp_path, "deadbeef")
    data = ("--data", str(tmp_path / "state"), "--num-shards", "1")
    with RoleProcess("scheduler", "--listen", "127.0.0.1:0", *data, **old) as scheduler:
        address = scheduler.address
        where = ("--listen", "127.0.0.1:0", "--scheduler", address, "--heartbeat-seconds", "0.1")
        server = RoleProcess("server", *where, **old)
        create = "cluster.create_table('t', dim=1, optimizer=gt.SGD(1.0)).assign(np.arange(1), np.full((1, 1), 7, 'f'))"
        typed_in(address, create, old)
    with server:
        with RoleProcess("scheduler", "--listen", address, *data):
            assert server.process.stderr is not None
            assert any("of wire 'deadbeef', and the scheduler is" in line for line in server.process.stderr)
        with RoleProcess("scheduler", "--listen", address, *data, **old):
            assert typed_in(address, "print(cluster.table('t').pull(np.arange(1)))", old) == "[[7.]]\n"


def test_the_identity_of_a_build_is_that_of_its_content_wherever_it_is_installed(tmp_path: Path) -> None:
    core = find_spec("geartrain.ams.kernels._core")
    assert core is not None and core.origin is not None
    installed = tmp_path / "geartrain"
    repository = Path(__file__).parents[3]
    shutil.copytree(repository / "ams", installed / "ams", ignore=shutil.ignore_patterns("csrc", "__pycache__"))
    shutil.copy(core.origin, installed / "ams/kernels")
    (installed / "__init__.py").touch()
    ask = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if isinstance(f, type)]\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from geartrain.ams.values import rpc; print(rpc.__file__, rpc.version())"
    )

    def identity() -> str:
        done = subprocess.run(
            [sys.executable, "-c", ask], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True
        )
        file, found = done.stdout.split()
        assert file == str(installed / "ams/values/rpc.py")
        return found

    assert identity() == version() and version().startswith(f"{release('geartrain')}+")
    changed = installed / "ams/scheduler/membership.py"
    changed.write_text(changed.read_text() + "\n")
    assert identity() != version()
