"""Slow and fast gears as real processes, forked from one that has imported torch: they start in milliseconds."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from tests.faults.children import Child

IDS, DIM, LR = 24, 4, 0.125
STOPS = (30, 50)


class Nursery:
    """Forks processes from one that has imported everything, and ends them all with itself."""

    def __init__(self) -> None:
        self._child = Child(_nurse)
        self._child.receive()

    def start(self, work: Callable[..., None], *arguments: Any) -> tuple[int, Connection]:
        """Run ``work(pipe, *arguments)``; return its process id and our end of the pipe."""
        mine, theirs = Pipe()
        self._child.pipe.send((work, theirs, arguments))
        pid: int = self._child.receive()
        theirs.close()
        return pid, mine

    def end(self, pid: int, number: int = signal.SIGKILL) -> int:
        """Send a process a signal, wait for its end and return its status."""
        self._child.pipe.send((None, pid, number))
        status: int = self._child.receive()
        return status

    def signal(self, pid: int, number: int) -> None:
        """Send a process a signal."""
        self._child.pipe.send((None, pid, -number))
        self._child.receive()

    def close(self) -> None:
        """End all."""
        self._child.pipe.send((None, 0, 0))
        self._child.exit_code()
        self._child.end()


def _nurse(pipe: Connection) -> None:
    import torch._dynamo  # noqa: F401

    import geartrain.launch.slowgear_role  # noqa: F401

    children: set[int] = set()
    pipe.send("ready")
    with contextlib.suppress(EOFError):
        while True:
            work, target, rest = pipe.recv()
            if work is not None:
                pid = os.fork()
                if not pid:
                    pipe.close()
                    _run(work, target, rest)
                target.close()
                children.add(pid)
                pipe.send(pid)
            elif target and rest < 0:
                os.kill(target, -rest)
                pipe.send("sent")
            elif target:
                os.kill(target, rest)
                children.discard(target)
                pipe.send(os.waitstatus_to_exitcode(os.waitpid(target, 0)[1]))
            else:
                break
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    os._exit(0)


def _run(work: Callable[..., None], pipe: Connection, arguments: tuple[Any, ...]) -> None:
    status = 1
    try:
        import torch

        torch.set_num_threads(1)
        work(pipe, *arguments)
        status = 0
    except BaseException as exc:
        with contextlib.suppress(OSError):
            pipe.send(exc)
    finally:
        os._exit(status)


def build() -> Any:
    """One column of weights an id: it counts the gradients of its id that were applied."""
    from torch import nn

    module = nn.Linear(IDS, DIM, bias=False)
    nn.init.zeros_(module.weight)
    return module


def samples(target: int) -> Any:
    """One-hot."""
    import torch

    return torch.eye(IDS)[target]


def slow_gear(pipe: Connection, scheduler: str, store: str = "memory", listen: str = "127.0.0.1:0") -> None:
    """Serve until SIGTERM; says the address."""
    from geartrain.launch import role
    from geartrain.launch.slowgear_role import SlowGearRole
    from tests.integration.gear.gear_cluster import CLIENT, gear_config

    settings: dict[str, Any] = {
        "module": "tests.integration.gear.gear_processes:build",
        "samples": "tests.integration.gear.gear_processes:samples",
        "optimizer": f"sgd:{LR}",
        "gradients_per_id": 3,
        "reduction": "sum",
        "store": store,
        "listen": listen,
    }
    service = SlowGearRole(gear_config(scheduler, **settings), CLIENT)
    pipe.send(service.start())
    role.serve("slowgear", service)


def fast_gear(pipe: Connection, scheduler: str, number: int, steps: int) -> None:
    """Deliver gradients of ones, and say each step. Waits at some to be told to go on, and at its end to flush."""
    import torch

    import geartrain as gt
    from tests.integration.gear.gear_cluster import CLIENT

    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("geartrain.ams.gear").addHandler(handler)
    random = torch.Generator().manual_seed(number)
    delivered = torch.zeros(IDS, dtype=torch.int64)
    with gt.connect(scheduler, config=CLIENT, stream=f"job/fast{number}") as cluster:
        image = gt.SlowGear(cluster, "image", dim=DIM, gradients_per_id=3, expire_seconds=0.0)
        rows = gt.RowOptimizer(image)
        for step in range(steps):
            if step in STOPS:
                pipe.recv()
            ids = torch.randint(IDS, (8,), generator=random).unique()
            image(ids).sum().backward()
            rows.step()
            delivered[ids] += 1
            pipe.send(step)
        pipe.send((delivered.tolist(), image.account()))
        pipe.recv()
        image.flush()
        pipe.send((image.account(), warnings))
        pipe.recv()
