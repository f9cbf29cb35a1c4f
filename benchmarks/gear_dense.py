"""A step of a module of 10M parameters: its weights in a dense table, against weights and Adam in this process.

Ours is ``DenseTable.step()``: one request a shard that pushes the gradients from where they lie, Adam in the shards,
and the new weights into the parameters. The rival is ``torch.optim.Adam(fused=True)`` on the same module, which serves
one process and moves nothing: the ratio says what it costs to share the weights, 4·P bytes up and 4·P down each step.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from _turns import median_seconds
from torch import nn

from geartrain.ams.client.cluster import Cluster
from geartrain.ams.client.factory import connect, local
from geartrain.ams.values.optimizers.registry import Adam
from geartrain.bridge.dense.dense_table import attach

LAYERS, WIDTH = 10, 1000
ROUNDS = 4
EMBEDDED, SERVED = 1 / 1.3, 1 / 2.5
"""Targets: of the rival's time, in this process and over a connection."""


def results(full: bool = False) -> Iterator[dict[str, Any]]:
    """The cases of ``geartrain bench gear_dense``; ``full`` takes five times as many rounds. One thread of torch's."""
    rounds = ROUNDS * (5 if full else 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for shards in (1, 2):
            with local(shards) as cluster:
                yield _compare(cluster, f"in this process, {shards} shard{'s' * (shards > 1)}", rounds, EMBEDDED)
            with _served(shards) as cluster:
                yield _compare(cluster, f"another process, {shards} shard{'s' * (shards > 1)}", rounds, SERVED)
    finally:
        torch.set_num_threads(threads)


def _compare(cluster: Cluster, where: str, rounds: int, target: float) -> dict[str, Any]:
    module, rival = _module(), _module()
    dense = attach(module, cluster, name="bench", optimizer=Adam(1e-4))
    adam = torch.optim.Adam(rival.parameters(), 1e-4, fused=True)
    sides: list[Callable[[None], object]] = [lambda _: dense.step(), lambda _: adam.step()]
    ours, theirs = median_seconds(sides, lambda: None, rounds=rounds, calls=4, uncounted=1)
    num_parameters = sum(one.numel() for one in module.parameters())
    return {
        "case": f"step of {num_parameters:,} parameters with Adam {where}",
        "ours": round(ours * 1e3, 2),
        "rival": "torch.optim.Adam(fused=True), nothing travels",
        "theirs": round(theirs * 1e3, 2),
        "unit": "ms",
        "ratio": round(theirs / ours, 3),
        "target": round(target, 2),
    }


def _module() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    return module


@contextmanager
def _served(shards: int) -> Iterator[Cluster]:
    command = [sys.executable, "-m", "geartrain", "up", f"--shards={shards}", "--scheduler-listen=127.0.0.1:0"]
    with subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as up:
        assert up.stdout is not None
        try:
            ready = json.loads(up.stdout.readline())
            with connect(ready["scheduler"]) as cluster:
                yield cluster
        finally:
            up.terminate()
