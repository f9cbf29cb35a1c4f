"""The launch scripts for real: a cluster of two servers and a worker of two ranks on loopback, from the shell."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from geartrain.ams.rpc.client.health import is_serving

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
SETTINGS = (
    "SCHEDULER",
    "LISTEN",
    "NUM_SHARDS",
    "NPROC_PER_NODE",
    "NNODES",
    "INSECURE",
    "SNAPSHOT_ROOTS",
    "OMP_NUM_THREADS",
)


def environment(**settings: str) -> dict[str, str]:
    bare = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    return {**bare, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", **settings}


def run(name: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    command = [str(SCRIPTS / f"launch_{name}.sh"), *arguments]
    return subprocess.run(command, env=environment(**settings), capture_output=True, text=True, timeout=150)


@contextmanager
def started(name: str, **settings: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, object]]]:
    """A role, and what its ready line said."""
    process = subprocess.Popen(
        [str(SCRIPTS / f"launch_{name}.sh")], env=environment(**settings), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def images(folder: Path) -> Path:
    for name, shape in (("box", ImageDraw.ImageDraw.rectangle), ("disc", ImageDraw.ImageDraw.ellipse)):
        (folder / name).mkdir(parents=True)
        for place in range(8):
            picture = Image.new("L", (40, 40), 255)
            shape(ImageDraw.Draw(picture), (6 + place % 3, 8, 30, 30 + place % 4), fill=0)
            picture.save(folder / name / f"{place}.png")
    return folder


def test_a_cluster_and_two_ranks_start_from_the_shell_and_end_by_sigterm(tmp_path: Path) -> None:
    with ExitStack() as stack:
        scheduler, facts = stack.enter_context(started("scheduler", NUM_SHARDS="2", LISTEN="127.0.0.1:0"))
        address = str(facts["address"])
        assert facts["pid"] == scheduler.pid  # exec: a signal to the script's process reaches the role
        servers = [stack.enter_context(started("server", SCHEDULER=address))[0] for _ in range(2)]
        graph, facts = stack.enter_context(started("graph", SCHEDULER=address, LISTEN="127.0.0.1:0"))
        assert (facts["ready"], facts["pid"]) == ("graph", graph.pid)
        part = {
            "MODULE": "tests.integration.gear.gear_part:build",
            "SAMPLES": "tests.integration.gear.gear_part:samples",
        }
        gear, facts = stack.enter_context(started("slowgear", SCHEDULER=address, NAME="image", DIM="4", **part))
        assert (facts["ready"], facts["name"], facts["partitions"], facts["pid"]) == ("slowgear", "image", 64, gear.pid)
        assert is_serving(str(facts["address"]), 5.0)
        out = tmp_path / "run"
        small = ["--steps=6", "--device=cpu", f"--out={out}"]
        small += [f"--set={key}" for key in ("batch_size=8", "look.size=32", "look.channels=1", "lr=0.1")]
        data = f"--data={images(tmp_path / 'images')}"
        done = run("worker", "classify", data, *small, SCHEDULER=address, NPROC_PER_NODE="2", OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr[-3000:]
        assert (out / "model" / "centers.safetensors").exists()
        gear.send_signal(signal.SIGTERM)
        assert gear.wait(20) == 0
        for role in (graph, *servers, scheduler):
            role.send_signal(signal.SIGTERM)
        assert [role.wait(20) for role in (graph, *servers, scheduler)] == [0, 0, 0, 0]


@pytest.fixture
def echo(tmp_path: Path) -> str:
    """A Python that only says what it was asked to run."""
    path = tmp_path / "python"
    path.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_a_script_of_ones_own_runs_under_torchrun(tmp_path: Path) -> None:
    script, python = tmp_path / "train.py", tmp_path / "python"
    script.touch()
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "$SCHEDULER" "$OMP_NUM_THREADS"\n')
    python.chmod(0o755)
    done = run("worker", str(script), "--lr=1", SCHEDULER="[::1]:1", NPROC_PER_NODE="1", PYTHON=str(python))
    torchrun = ["torch.distributed.run", "--nproc-per-node=1", "--max-restarts=0", "--rdzv-backend=loopback"]
    threads = len(os.sched_getaffinity(0))
    assert done.stdout.split() == ["-m", *torchrun, str(script), "--lr=1", "[::1]:1", str(threads)], done.stderr


def test_a_single_worker_runs_without_torchrun_so_that_its_exit_code_is_the_scripts(echo: str) -> None:
    done = run("worker", "ctr", "--continue", PYTHON=echo, SCHEDULER="a:7000", NPROC_PER_NODE="1")
    assert done.stdout.split() == ["-m", "geartrain", "worker", "ctr", "--continue", "--scheduler=a:7000"], done.stderr
    again = run("worker", "ctr", PYTHON=echo, SCHEDULER="a:7000", NPROC_PER_NODE="1", MAX_RESTARTS="3")
    assert "--max-restarts=3" in again.stdout, again.stderr


LISTENERS = """
import os, psutil, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
for process in (os.getpid(), os.getppid()):
    for one in psutil.Process(process).net_connections("inet"):
        if one.status == psutil.CONN_LISTEN:
            os.write(1, f"listens {one.laddr.ip}\\n".encode())  # whole, whatever the other rank prints
dist.barrier()
dist.destroy_process_group()
"""


def test_nothing_of_torchrun_and_its_ranks_listens_beyond_this_machine(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LISTENERS)
    done = run("worker", str(script), SCHEDULER="127.0.0.1:1", NPROC_PER_NODE="2", GLOO_SOCKET_IFNAME="none")
    assert done.returncode == 0, done.stderr[-3000:]
    told = done.stdout.splitlines()
    assert len(told) >= 4  # the agent's store as either rank sees it, and gloo of each
    assert set(told) == {"listens 127.0.0.1"}


def test_environment_variables_become_flags(echo: str) -> None:
    server = run("server", "--log-level=debug", PYTHON=echo, SCHEDULER="a:7000", LISTEN="b:0", SHARDS="3", INSECURE="1")
    expected = ["-P", "-m", "geartrain", "server", "--scheduler=a:7000", "--listen=b:0", "--shards=3", "--insecure"]
    assert server.stdout.split() == [*expected, "--log-level=debug"]
    part = {"NAME": "image", "MODULE": "m:build", "SAMPLES": "folder:/x", "DIM": "64"}
    gear = run("slowgear", "-m", "4", PYTHON=echo, SCHEDULER="a:7000", STORE="redis://r:6379/0", **part)
    told = ["--name=image", "--module=m:build", "--samples=folder:/x", "--dim=64", "--store=redis://r:6379/0"]
    assert gear.stdout.split() == ["-P", "-m", "geartrain", "slowgear", "--scheduler=a:7000", *told, "-m", "4"]
    for role in ("graph", "server"):
        told = run(role, PYTHON=echo, SCHEDULER="a:7000", SNAPSHOT_ROOTS="/a,s3://b/c").stdout.split()
        assert told == ["-P", "-m", "geartrain", role, "--scheduler=a:7000", "--snapshot-roots=/a,s3://b/c"]


def test_several_hosts_meet_by_the_scheduler(echo: str) -> None:
    done = run("worker", "glyphs", PYTHON=echo, SCHEDULER="a:7000", NNODES="1:2", JOB_ID="signs", NPROC_PER_NODE="1")
    told = done.stdout.split()
    assert {"--nnodes=1:2", "--rdzv-backend=geartrain", "--rdzv-endpoint=a:7000", "--rdzv-id=signs"} <= set(told)
    assert not done.stderr


def test_several_hosts_meet_at_the_master(echo: str) -> None:
    settings = {"SCHEDULER": "a:7000", "NNODES": "2", "MASTER_ADDR": "m", "MAX_RESTARTS": "3"}
    settings["INSECURE"] = "1"
    done = run("worker", "glyphs", PYTHON=echo, CUDA_VISIBLE_DEVICES="0,2,5", **settings)
    told = done.stdout.split()
    wanted = ["--nproc-per-node=3", "--nnodes=2", "--rdzv-endpoint=m:29500", "--max-restarts=3"]
    assert set(wanted) <= set(told)
    assert told[-5:] == ["-m", "geartrain", "worker", "glyphs", "--scheduler=a:7000"]
    assert "runs code that whoever reaches its port sends" in done.stderr


@pytest.mark.parametrize(
    ("name", "arguments", "settings", "message"),
    [
        ("scheduler", [], {}, "NUM_SHARDS is not set"),
        ("scheduler", [], {"NUM_SHARDS": "two"}, "NUM_SHARDS is 'two'"),
        ("scheduler", [], {"NUM_SHARDS": "2", "LISTEN": "7000"}, "LISTEN is '7000'; it must be HOST:PORT"),
        ("server", [], {}, "SCHEDULER is not set"),
        ("server", [], {"SCHEDULER": "host:port"}, "SCHEDULER is 'host:port'"),
        ("server", [], {"SCHEDULER": "a:1", "INSECURE": "yes"}, "INSECURE is 'yes'"),
        ("graph", [], {}, "SCHEDULER is not set"),
        ("slowgear", [], {}, "SCHEDULER is not set"),
        ("slowgear", [], {"SCHEDULER": "a:1", "NAME": "x", "MODULE": "m:b", "DIM": "4"}, "SAMPLES is not set"),
        ("worker", [], {}, "what shall be trained"),
        ("worker", ["glyphs"], {"NPROC_PER_NODE": "2"}, "SCHEDULER is not set"),
        ("worker", ["glyphs"], {"NPROC_PER_NODE": "some"}, "NPROC_PER_NODE is 'some'"),
        ("worker", ["glyphs"], {"NNODES": "2", "SCHEDULER": "a:1", "INSECURE": "1"}, "MASTER_ADDR is not set"),
        ("worker", ["glyphs", "--rows=ranks"], {"NNODES": "2", "MASTER_ADDR": "m"}, "SCHEDULER is not set"),
        ("worker", ["glyphs"], {"NNODES": "2", "SCHEDULER": "a:1", "INSECURE": "no"}, "INSECURE is 'no'"),
        ("worker", ["glyphs"], {"NNODES": "2:"}, "NNODES is '2:'"),
        ("worker", ["none.py"], {}, "none.py does not exist"),
        ("worker", ["glyphs"], {"PYTHON": "/no/python"}, "PYTHON is '/no/python'"),
    ],
)
def test_what_is_missing_is_named(name: str, arguments: list[str], settings: dict[str, str], message: str) -> None:
    done = run(name, *arguments, **settings)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize("name", ["scheduler", "server", "graph", "slowgear", "worker"])
def test_help_names_every_variable(name: str) -> None:
    done = run(name, "--help")
    assert done.returncode == 0
    script = (SCRIPTS / f"launch_{name}.sh").read_text()
    assert {word for word in SETTINGS if f"${{{word}:-" in script} <= set(done.stdout.split())
    assert "shellcheck" not in done.stdout
