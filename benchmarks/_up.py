"""Start of commands by benches, and a cluster of processes on this machine while a bench needs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from geartrain.ams.values.errors import GeartrainError

GEARTRAIN = (sys.executable, "-P", "-m", "geartrain")
"""Command of the installed package, also in a checkout, whose folder of that name lacks most of it."""


class CommandEnded(GeartrainError):
    """A command that a bench started ended before it was ready."""


@contextmanager
def started(
    command: Sequence[object], env: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Yield a process, stopped after the block, and the JSON object in its first line.

    Raises CommandEnded, with the last line that it wrote to its stderr, if it ends without one.
    """
    words = list(map(str, command))
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as said,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=said, text=True, env=env) as process,
    ):
        assert process.stdout is not None
        try:
            if not (line := process.stdout.readline()):
                code = process.wait()
                said.seek(0)
                lines = [line.strip("│ ") for line in said.read().splitlines() if any(map(str.isalpha, line))]
                raise CommandEnded(f"'{' '.join(words)}' ended with {code}: {''.join(lines[-1:]) or 'it said nothing'}")
            yield process, json.loads(line)
        finally:
            process.terminate()


@contextmanager
def running_cluster(
    shards: int = 1,
    *,
    host: str = "127.0.0.1",
    flags: Sequence[str] = (),
    settings: Mapping[str, str] | None = None,
    prefix: Sequence[str] = (),
) -> Iterator[dict[str, Any]]:
    """Yield the ready line of ``geartrain up --json``: the address of its ``scheduler``, its ``pids`` by role and more.

    Args:
        shards: of the cluster.
        host: where its scheduler listens.
        flags: further ones of ``geartrain up``.
        settings: variables of the environment, such as ``GEARTRAIN_SERVER__SHARDS``.
        prefix: a command that runs the command, such as ``ip netns exec``.
    """
    command = [*GEARTRAIN, "up", f"--shards={shards}", f"--scheduler-listen={host}:0", "--json"]
    with started([*prefix, *command, *flags], {**os.environ, **(settings or {})}) as (_, facts):
        yield facts
