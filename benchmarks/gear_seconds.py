"""Convergence over seconds with workers and slow gears as processes: the paper's Figures 4 and 5 at a machine's size.

Two workers train 200 glyphs in halves through one cluster, conventionally or with as many slow gears; the bottom part
is four times as wide as the top part. The tables are tested while they train, on fonts that training does not see.
All share this machine's processors, in both ways of training. See ``_halves_task.py``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from _common import result
from _halves_task import BATCH, DIM, LEARNING_RATE, FastPart, HalfNet, glyph_halves
from _up import GEARTRAIN, running_cluster, started
from torch import Tensor, nn
from torch.nn import functional

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.launch.bench import Result

HERE = Path(__file__)
EXPIRIES = (0.0, 1.0, 5.0)
CONVENTIONAL = "conventional"
WORKERS, CHANNELS, GRADIENTS_PER_ID = 2, 64, 4
SECONDS, TESTS = 10.0, 5
Curve = list[tuple[float, float, int]]
"""(seconds of training, accuracy, updates of the top part)."""


def build() -> nn.Module:
    """The bottom part, with the same initial weights everywhere."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return HalfNet(CHANNELS)


def samples(number: int) -> Tensor:
    """The bottom half of an image to train on."""
    return glyph_halves().train.bottoms[number]


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench gear_seconds``; ``full`` trains four times as long."""
    glyph_halves()  # drawn once, before others read it
    seconds = SECONDS * (4 if full else 1)
    conventional = _curve(CONVENTIONAL, seconds)
    for expire_seconds in EXPIRIES:
        ours = _curve(str(expire_seconds), seconds)
        for (at, mine, steps), (_, theirs, others) in zip(ours, conventional, strict=True):
            case = f"top-1 at {at:g} s, {WORKERS} workers, expiry {expire_seconds:g} s ({steps} and {others} steps)"
            points = (max(100 * mine, 0.01), CONVENTIONAL, max(100 * theirs, 0.01))
            yield result(case, *points, "points", more_is_better=True)


def _curve(kind: str, seconds: float) -> Curve:
    """Train by as many processes, and test on the way."""
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parent}:{HERE.parents[1] / 'examples'}", "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        address = stack.enter_context(running_cluster())["scheduler"]
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="gt-bench-")))
        gates = [folder / str(number) for number in range(WORKERS)]
        for number, gate in enumerate(gates):
            os.mkfifo(gate)
            if kind != CONVENTIONAL:
                stack.enter_context(started(_slow_gear(address), environment))
            stack.enter_context(started([sys.executable, HERE, address, kind, number, gate], environment))
        cluster = stack.enter_context(gt.connect(address))
        parts = FastPart(glyph_halves().num_classes), build()
        tables = [_attached(part, cluster, name) for part, name in zip(parts, ("fast", "bottom"), strict=True)]
        before, curve = tables[0].version, Curve()
        for gate in gates:
            gate.write_text("go")
        begun = time.monotonic()
        for number in range(1, TESTS + 1):
            at = seconds * number / TESTS
            time.sleep(max(0.0, begun + at - time.monotonic()))
            for table in tables:
                table.refresh()
            curve.append((at, _accuracy(*parts), tables[0].version - before))
    return curve


def _slow_gear(address: str) -> list[object]:
    what = [*GEARTRAIN, "slowgear", "--scheduler", address, "--name", "bottom", "--dim", DIM, "--json"]
    part = ["--module", "gear_seconds:build", "--samples", "gear_seconds:samples", "--train-mode", "never"]
    counts = ["--gradients-per-id", GRADIENTS_PER_ID, "--ids-per-update", BATCH // WORKERS]
    return [*what, *part, *counts, "--optimizer", f"adam:{LEARNING_RATE}"]


def _attached(part: nn.Module, cluster: Cluster, name: str) -> Any:
    return gt.attach(part, cluster, name=name, mode="async", optimizer=gt.Adam(LEARNING_RATE), reuse=True)


@torch.no_grad()
def _accuracy(fast: FastPart, dense: nn.Module) -> float:
    """Top-1 of unseen fonts."""
    test = next(iter(glyph_halves().tests.values()))
    return float((fast(test.tops, dense(test.bottoms)).argmax(dim=1) == test.labels).float().mean())


def _work(address: str, kind: str, number: int, gate: Path) -> None:
    """Train until it is ended. The bottom part is trained here, or by slow gears."""
    torch.manual_seed(0)
    data, fast = glyph_halves().train, FastPart(glyph_halves().num_classes)
    with gt.connect(address) as cluster:
        steps = [_attached(fast, cluster, "fast")]
        if kind == CONVENTIONAL:
            dense = build()
            steps.append(_attached(dense, cluster, "bottom"))
        else:
            gear = gt.SlowGear(
                cluster, "bottom", dim=DIM, expire_seconds=float(kind), gradients_per_id=GRADIENTS_PER_ID
            )
            steps.append(gt.RowOptimizer(gear))
        print(json.dumps({"ready": number}), flush=True)
        gate.read_text()
        for batch in data.batches(BATCH, seed=number, passes=10_000):
            bottoms_BD = dense(data.bottoms[batch.image_ids]) if kind == CONVENTIONAL else gear(batch.image_ids)
            loss = functional.cross_entropy(fast(batch.tops, bottoms_BD), batch.labels)
            for part in steps:
                part.zero_grad()
            loss.backward()
            for part in steps:
                part.step()


if __name__ == "__main__":
    _work(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
