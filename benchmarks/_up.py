"""A cluster of processes on this machine, for as long as a bench needs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def running_cluster(
    shards: int = 1,
    *,
    host: str = "127.0.0.1",
    flags: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """What ``geartrain up --json`` says of a cluster: the address of its ``scheduler``, its ``pids`` by role and more.

    Args:
        shards: of the cluster.
        host: where its scheduler listens.
        flags: further ones of ``geartrain up``.
        settings: variables of the environment, such as ``GEARTRAIN_SERVER__SHARDS``.
        prefix: a command that runs the command, such as ``ip netns exec``.
    """
    command = [sys.executable, "-m", "geartrain", "up", f"--shards={shards}", f"--scheduler-listen={host}:0", "--json"]
    with subprocess.Popen(
        [*prefix, *command, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **(settings or {})},
    ) as up:
        assert up.stdout is not None
        try:
            yield json.loads(up.stdout.readline())
        finally:
            up.terminate()
