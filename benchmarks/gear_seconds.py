"""Convergence over seconds with workers and slow gears as processes: the paper's Figures 4 and 5 at a machine's size.

Workers train 200 glyphs in halves through one cluster, conventionally or with as many slow gears; the bottom part is
four times as wide as the top part. The tables are tested while they train, on fonts that training does not see. Each
place has conventional training of its own, beside gears:

- *shared*: all processes share this machine's processors, in both ways of training.
- *slow link*: as that, and to send the bottom part's gradients and fetch its weights takes 50 ms in which nothing is
  computed, at each update of it, whoever makes it.
- *machines*: each worker and each slow gear has a processor of its own: twice as many as conventional training has, as
  in the paper, where 20 conventional workers stand beside 20 fast and 20 slow gears.

A case prints steps and updates of the bottom part a second, and processor time of a step by its parts, ours and theirs.
See ``_halves_task.py``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from _common import result
from _halves_task import BATCH, DIM, LEARNING_RATE, FastPart, HalfNet, glyph_halves
from _up import GEARTRAIN, running_cluster, started
from gear_places import Seen
from torch import Tensor, nn
from torch.nn import functional

import geartrain as gt
from geartrain.ams.client.cluster import Cluster
from geartrain.launch.bench import Result

HERE = Path(__file__)
CHANNELS, SECONDS, TESTS = 64, 10.0, 2
LINK_SECONDS = "GT_BENCH_LINK_SECONDS"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One training."""

    place: str
    workers: int
    link_seconds: float = 0.0
    """For the bottom part's gradients and weights to travel."""
    is_pinned: bool = False
    """Whether each process of a worker or slow gear has one processor."""
    expire_seconds: float | None = None
    """None: conventional training."""
    gradients_per_id: int = 4
    ids_per_update: int = BATCH // 2

    def __str__(self) -> str:
        gear = f"expiry {self.expire_seconds:g} s, M={self.gradients_per_id}, {self.ids_per_update} ids an update"
        return f"{self.place}, {self.workers} workers" + ("" if self.expire_seconds is None else f", {gear}")


@dataclass(frozen=True, kw_only=True)
class SeenProcesses(Seen):
    """What the processes of a training had reached by a time."""

    cpu_seconds: tuple[float, float, float]
    """Of workers, slow gears and the cluster."""

    def __str__(self) -> str:
        workers, gears, cluster = (1e3 * seconds / max(self.steps, 1) for seconds in self.cpu_seconds)
        return f"{super().__str__()}, a step {workers:.1f} + {gears:.1f} + {cluster:.1f} ms of CPU"


SHARED = Way(place="shared", workers=2)
LINKED = replace(SHARED, place="slow link", link_seconds=0.05)
PINNED = replace(SHARED, place="machines", workers=1, is_pinned=True)
WAYS = [way for place in (SHARED, LINKED, PINNED) for way in (place, replace(place, expire_seconds=0.0))]
MORE = [way for place in (PINNED, LINKED, SHARED) for way in (place, replace(place, expire_seconds=1.0))]
MORE.append(replace(SHARED, expire_seconds=0.0, gradients_per_id=1))
MORE.append(replace(SHARED, expire_seconds=1.0, ids_per_update=8))
"""With ``full``."""


def build() -> nn.Module:
    """Build the bottom part, with the same weights everywhere; each backward pass ends with the link's time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = HalfNet(CHANNELS)
    seconds = float(os.environ.get(LINK_SECONDS, "0"))
    next(module.parameters()).register_post_accumulate_grad_hook(lambda _: time.sleep(seconds))
    return module


def samples(number: int) -> Tensor:
    """The bottom half of an image to train on."""
    return glyph_halves().train.bottoms[number]


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench gear_seconds``; ``full`` trains six times as long, in more ways."""
    glyph_halves()  # drawn once, before others read it
    seconds = SECONDS * (6 if full else 1)
    for way in WAYS + MORE * full:
        curve = _curve(way, seconds)
        if way.expire_seconds is None:
            conventional = curve
            continue
        for mine, theirs in zip(curve, conventional, strict=True):
            points = (max(100 * mine.accuracy, 0.01), "conventional", max(100 * theirs.accuracy, 0.01))
            case = f"top-1 at {mine.at_seconds:g} s, {way} ({mine}; conventional {theirs})"
            yield result(case, *points, "points", more_is_better=True)


def _curve(way: Way, seconds: float) -> list[SeenProcesses]:
    """Train by as many processes, and test on the way."""
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parent}:{HERE.parents[1] / 'examples'}", "OMP_NUM_THREADS": "1"}
    environment[LINK_SECONDS] = str(way.link_seconds)
    pins = [["taskset", "-c", str(number)] if way.is_pinned else [] for number in range(2 * way.workers)]
    with ExitStack() as stack:
        facts = stack.enter_context(running_cluster())
        address = facts["scheduler"]
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="gt-bench-")))
        gates = [folder / str(number) for number in range(way.workers)]
        pids: list[list[int]] = [[], [], list(facts["pids"].values())]
        for number, gate in enumerate(gates):
            os.mkfifo(gate)
            if way.expire_seconds is not None:
                command = [*pins[way.workers + number], *_slow_gear(address, way)]
                pids[1].append(stack.enter_context(started(command, environment))[0].pid)
            command = [*pins[number], sys.executable, HERE, address, way.expire_seconds, way.gradients_per_id]
            pids[0].append(stack.enter_context(started([*command, number, gate], environment))[0].pid)
        cluster = stack.enter_context(gt.connect(address))
        parts = FastPart(glyph_halves().num_classes), build()
        tables = [_attached(part, cluster, name) for part, name in zip(parts, ("fast", "bottom"), strict=True)]
        versions, spent = [table.version for table in tables], [_cpu_seconds(each) for each in pids]
        for gate in gates:
            gate.write_text("go")
        begun, curve = time.monotonic(), []
        for number in range(1, TESTS + 1):
            at = seconds * number / TESTS
            time.sleep(max(0.0, begun + at - time.monotonic()))
            for table in tables:
                table.refresh()
            steps, updates = (table.version - version for table, version in zip(tables, versions, strict=True))
            workers, gears, servers = (_cpu_seconds(each) - then for each, then in zip(pids, spent, strict=True))
            seen = SeenProcesses(
                at_seconds=at,
                accuracy=_accuracy(*parts),
                steps=steps,
                updates=updates,
                cpu_seconds=(workers, gears, servers),
            )
            curve.append(seen)
    return curve


def _cpu_seconds(pids: list[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def _slow_gear(address: str, way: Way) -> list[object]:
    what = [*GEARTRAIN, "slowgear", "--scheduler", address, "--name", "bottom", "--dim", DIM, "--json"]
    part = ["--module", "gear_seconds:build", "--samples", "gear_seconds:samples", "--train-mode", "never"]
    counts = ["--gradients-per-id", way.gradients_per_id, "--ids-per-update", way.ids_per_update]
    return [*what, *part, *counts, "--optimizer", f"adam:{LEARNING_RATE}"]


def _attached(part: nn.Module, cluster: Cluster, name: str) -> Any:
    return gt.attach(part, cluster, name=name, mode="async", optimizer=gt.Adam(LEARNING_RATE), reuse=True)


@torch.no_grad()
def _accuracy(fast: FastPart, dense: nn.Module) -> float:
    """Top-1 of unseen fonts."""
    test = next(iter(glyph_halves().tests.values()))
    return float((fast(test.tops, dense(test.bottoms)).argmax(dim=1) == test.labels).float().mean())


def _work(address: str, expire_seconds: float | None, gradients_per_id: int, number: int, gate: Path) -> None:
    """Train until it is ended. The bottom part is trained here, or by slow gears."""
    torch.manual_seed(0)
    data, fast = glyph_halves().train, FastPart(glyph_halves().num_classes)
    with gt.connect(address) as cluster:
        steps = [_attached(fast, cluster, "fast")]
        if expire_seconds is None:
            dense = build()
            steps.append(_attached(dense, cluster, "bottom"))
        else:
            gear = gt.SlowGear(
                cluster, "bottom", dim=DIM, expire_seconds=expire_seconds, gradients_per_id=gradients_per_id
            )
            steps.append(gt.RowOptimizer(gear))
        print(json.dumps({"ready": number}), flush=True)
        gate.read_text()
        for batch in data.batches(BATCH, seed=number, passes=10_000):
            bottoms_BD = dense(data.bottoms[batch.image_ids]) if expire_seconds is None else gear(batch.image_ids)
            loss = functional.cross_entropy(fast(batch.tops, bottoms_BD), batch.labels)
            for part in steps:
                part.zero_grad()
            loss.backward()
            for part in steps:
                part.step()


if __name__ == "__main__":
    expiry = None if sys.argv[2] == "None" else float(sys.argv[2])
    _work(sys.argv[1], expiry, int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
