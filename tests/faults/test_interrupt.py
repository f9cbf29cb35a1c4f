"""Ctrl-C ends a program that waits for a dead shard soon and in good order, also with work in the background."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.children import Child, serve
from tests.faults.scenarios import Served, shard_settings

SOON_SECONDS = 5.0
"""It takes 0.1 s on an idle machine, and took more than a minute."""
PROGRAM = """
import sys
import numpy as np
import geartrain as gt

with gt.connect(sys.argv[1]) as cluster:
    table = cluster.create_table("t", dim=2, optimizer=gt.SGD(1.0), num_rows=8192)
    ids = np.arange(8192)
    table.push(ids, np.ones((8192, 2), np.float32))
    print("pushed", flush=True)
    sys.stdin.readline()
    {}
"""
EMBEDDED = """
import numpy as np
import geartrain as gt
from geartrain.ams.values.shard_messages import SyncGroup

with gt.local(2) as cluster:
    table = cluster.create_table("t", dim=2, optimizer=gt.SGD(1.0), num_rows=8192)
    group = SyncGroup(job="j", rank=0, world_size=2, sequence=1, sample_count=1)
    pushed = cluster._calls.background(table.push, np.arange(8192), np.ones((8192, 2), np.float32), group=group)
    print("pushed", flush=True)
    pushed.result()
"""


@pytest.fixture
def roles() -> Iterator[tuple[Served, Child]]:
    served = Served(2, None)
    shard = Child(serve, "server", {**shard_settings(served.address, 0), "listen": "127.0.0.1:0"})
    try:
        shard.receive()
        served.start_shard(1)
        yield served, shard
    finally:
        shard.end()
        served.stop()


def started(program: str, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    if process.stdout.readline() != "pushed\n":
        raise AssertionError(process.communicate()[1])
    return process


def interrupted(process: subprocess.Popen[str]) -> str:
    """Press Ctrl-C; return what the process wrote to stderr before it ended."""
    pressed = time.monotonic()
    process.send_signal(signal.SIGINT)
    try:
        _, log = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGINT, log
    assert time.monotonic() - pressed < SOON_SECONDS
    return log


@pytest.mark.parametrize(
    "work",
    [
        "table.push(ids, np.ones((8192, 2), np.float32))",
        "table.pull_async(ids).result()",
        "cluster.snapshot(sys.argv[2])",
    ],
    ids=["push", "background", "snapshot"],
)
def test_ctrl_c_ends_the_wait_for_a_dead_shard(work: str, roles: tuple[Served, Child], tmp_path: Path) -> None:
    served, shard = roles
    process = started(PROGRAM.format(work), served.address, str(tmp_path))
    shard.end()
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write("\n")
    process.stdin.flush()
    while "does not answer, waiting for it up to 60 s" not in (line := process.stderr.readline()):
        assert line, "the program ended without waiting"
    assert "KeyboardInterrupt" in interrupted(process)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_the_wait_for_a_missing_rank_in_this_process() -> None:
    assert "KeyboardInterrupt" in interrupted(started(EMBEDDED))
