"""A step of a fast gear with gradients in a store, against memory: slow gears as processes, in turns.

Each store has a slow gear and a dense table of its own, in one cluster; 64 of 4,096 ids a step, D = 64, M = 4. With an
expiry of 0 s every step asks for all its features, which the slow gear computes and writes to its store; with 20 s most
come out of the worker's memory, and a step is a delivery.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from _common import median_seconds, result, threads
from _redis_server import redis_client, socket_of
from _up import GEARTRAIN, running_cluster, started
from torch import Tensor, nn

import geartrain as gt
from geartrain.launch.bench import Result

NUM_IDS, IDS, DIM, INPUTS = 4096, 64, 64, 256
GRADIENTS_PER_ID = 4
EXPIRIES = (0.0, 20.0)
ROUNDS = 8
ALLOWED = 1.15


def build() -> nn.Module:
    """The dense part."""
    return nn.Sequential(nn.Linear(INPUTS, 256), nn.ReLU(), nn.Linear(256, DIM))


def samples(number: int) -> Tensor:
    """What an id looks like."""
    return torch.randn(INPUTS, generator=torch.Generator().manual_seed(number))


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench gear_store``; ``full``: four times the turns."""
    with ExitStack() as stack:
        stack.enter_context(threads(1))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gt-bench-"))
        stores = {"memory": "memory", "lmdb": f"lmdb:{folder}"}
        if (client := stack.enter_context(redis_client())) is not None:
            stores["redis"] = f"unix://{socket_of(client)}?db=0"
        address = stack.enter_context(running_cluster())["scheduler"]
        for name, store in stores.items():
            stack.enter_context(started(_command(address, name, store), _environment()))
        cluster = stack.enter_context(gt.connect(address))
        for expire_seconds in EXPIRIES:
            steps = [_stepper(cluster, name, expire_seconds) for name in stores]
            taken = median_seconds(steps, lambda: torch.randint(NUM_IDS, (IDS,)), rounds=ROUNDS * (4 if full else 1))
            memory, *others = (1e3 * seconds for seconds in taken)
            for name, millis in zip([*stores][1:], others, strict=True):
                case = f"step, store {name}, expiry {expire_seconds:g} s, {IDS} ids, D={DIM}, M={GRADIENTS_PER_ID}"
                yield result(case, millis, "store memory", memory, "ms", target=1 / ALLOWED)


def _command(scheduler: str, name: str, store: str) -> list[object]:
    what = [*GEARTRAIN, "slowgear", "--scheduler", scheduler, "--name", name, "--store", store, "--json"]
    part = ["--module", "gear_store:build", "--samples", "gear_store:samples", "--dim", DIM, "--train-mode", "never"]
    return [*what, *part, "--gradients-per-id", GRADIENTS_PER_ID, "--ids-per-update", IDS]


def _environment() -> dict[str, str]:
    """So that slow gears find the dense part, on one thread each."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}


def _stepper(cluster: Any, name: str, expire_seconds: float) -> Callable[[Tensor], object]:
    gear = gt.SlowGear(cluster, name, dim=DIM, expire_seconds=expire_seconds, gradients_per_id=GRADIENTS_PER_ID)
    rows = gt.RowOptimizer(gear)

    def step(ids: Tensor) -> None:
        gear(ids).mean().backward()
        rows.step()

    return step
