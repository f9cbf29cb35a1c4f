"""A cluster with slow gears as processes of their own, for the bench that kills one; and what those load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from _gear_task import BATCH, DIM, LEARNING_RATE, CreativeNet, build_dense, page_views
from torch import Tensor

from geartrain.ams.values.errors import InternalError

LEASE_SECONDS = 2.0


def build() -> CreativeNet:
    """The dense part, shallow."""
    torch.set_num_threads(1)
    return build_dense(1, 0)


def samples(image_id: int) -> Tensor:
    """The picture of an id."""
    return page_views().pictures[image_id]


class Processes:
    """A scheduler, a shard and two slow gears; each ends with the stack, or with this process."""

    def __init__(self, stack: ExitStack, *, gradients_per_id: int, store: str = "memory") -> None:
        self._stack = stack
        self.address, _ = self._start("scheduler", "--listen", "127.0.0.1:0", "--num-shards", "1")
        self._start("server", "--scheduler", self.address)
        options = {
            "--scheduler": self.address,
            "--name": "creative",
            "--dim": str(DIM),
            "--module": "_gear_processes:build",
            "--samples": "_gear_processes:samples",
            "--optimizer": f"adam:{LEARNING_RATE}",
            "--gradients-per-id": str(gradients_per_id),
            "--ids-per-update": str(BATCH),
            "--train-mode": "never",
            "--store": store,
        }
        flags = [word for pair in options.items() for word in pair]
        self.kill_slow_gears = [self._start("slowgear", *flags)[1] for _ in range(2)]
        """Each kills one (SIGKILL)."""

    def _start(self, role: str, *arguments: str) -> tuple[str, Callable[[], None]]:
        """The address of a role that serves, and what kills it."""
        here = Path(__file__).resolve().parent
        environ = {
            **os.environ,
            "GEARTRAIN_SCHEDULER__STREAM_LEASE_SECONDS": str(LEASE_SECONDS),
            "PYTHONPATH": os.pathsep.join([str(here), str(here.parent / "examples"), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, "-m", "geartrain", role, *arguments, "--end-with-parent", "--log-level", "error"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, text=True)

        def end() -> None:
            process.kill()
            process.wait()

        self._stack.callback(end)
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise InternalError(f"the {role} ended with code {process.wait()} before it served")
        return str(json.loads(line).get("address", "")), end
