"""Sparsified gradients over a slow link: a step of 25 million parameters, against DDP as it is, fp16 and PowerSGD.

Two ranks of one thread; six linear layers of 2,048, 44 samples a rank, SGD with momentum. Behind links of 1 Gbit/s a
dense gradient takes 0.8 s; without that, the step is what one rank alone takes ("local"). The target is 0.8 of (local +
0.8 s) ÷ local, and half of what DDP's fp16 hook takes. PowerSGD has rank 2, at which its bytes are equal (it needs
one bucket: over gloo its collectives of several buckets wait for each other for ever). Over loopback the hook is to be
no slower than DDP. Bytes are those of the interface, headers included.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from _common import result
from _rank_group import RankGroup, rank_group, why_no_links
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import geartrain as gt
from geartrain.launch.bench import Result

WIDTH, LAYERS, SAMPLES, LR, MOMENTUM = 2048, 6, 44, 0.01, 0.9
BITS, DENSE_SECONDS = 1e9, 0.8
WAYS = ("top-k", "DDP", "DDP, fp16 hook", "DDP, PowerSGD", "local")


class Way:
    """One training."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())]
        self.model: nn.Module = nn.Sequential(*layers)
        if name != "local":
            cap = 200 if name == "DDP, PowerSGD" else 25
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True, bucket_cap_mb=cap)
        momentum = 0.0 if name == "top-k" else MOMENTUM
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR, momentum=momentum)
        self._add_hook(name, self.model)

    def _add_hook(self, name: str, model: Any) -> None:
        match name:
            case "top-k":
                gt.TopKGradients(sparsity=0.999, momentum=MOMENTUM).attach(model, self.optimizer)
            case "DDP, fp16 hook":
                model.register_comm_hook(None, fp16_compress_hook)
            case "DDP, PowerSGD":
                state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
                model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def step(self, inputs: Tensor) -> None:
        """Train once."""
        self.model(inputs).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Side:
    """All ways on one rank."""

    def __init__(self) -> None:
        self.inputs = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
        self.ways: dict[str, Way] = {}

    def turn(self, way: str, steps: int) -> list[float]:
        """Seconds of each step."""
        if way not in self.ways:
            self.ways[way] = Way(way)
        seconds = []
        for _ in range(steps):
            dist.barrier()
            began = time.perf_counter()
            self.ways[way].step(self.inputs)
            seconds.append(time.perf_counter() - began)
        return seconds


def results(full: bool = False) -> Iterator[Result]:  # noqa: ARG001
    """Yield the cases of ``geartrain bench topk_link``."""
    with rank_group(Side, 2) as group:
        seconds, _ = _measured(group, ("top-k", "DDP"), links=False)
    model = f"{LAYERS * WIDTH**2 / 1e6:.0f} million parameters, 2 ranks"
    case = f"{model}, loopback: a step, top-k 0.999"
    yield result(case, seconds["top-k"] * 1e3, "DDP", seconds["DDP"] * 1e3, "ms", target=1.0)
    if why := why_no_links():
        print(f"links of topk_link are left out: {why}")
        return
    with rank_group(Side, 2, bits_per_second=BITS) as group:
        seconds, sent = _measured(group, WAYS, links=True)
    local = seconds["local"]
    targets = {"DDP": 0.8 * (local + DENSE_SECONDS) / local, "DDP, fp16 hook": 2.0, "DDP, PowerSGD": None}
    case = f"{model}, 1 Gbit/s, a local step of {local * 1e3:.0f} ms: "
    for way, target in targets.items():
        yield result(f"{case}a step", seconds["top-k"] * 1e3, way, seconds[way] * 1e3, "ms", target=target)
    for way in targets:
        target = 100.0 if way == "DDP" else None
        yield result(f"{case}sent by a rank", sent["top-k"] / 1e3, way, sent[way] / 1e3, "kB", target=target)
    yield result(f"{case}a step", seconds["top-k"] * 1e3, "local", local * 1e3, "ms", target=None)


def _measured(group: RankGroup, ways: tuple[str, ...], *, links: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of the slower rank, and mean bytes a rank sends in a step, by way."""
    rounds, steps = 4, 4
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    sent = dict.fromkeys(ways, 0.0)
    for number in range(rounds + 1):
        for way in ways:
            before = [count.sent for count in group.interface_bytes()] if links else [0, 0]
            by_rank = group.call("turn", way=way, steps=steps)
            after = [count.sent for count in group.interface_bytes()] if links else [0, 0]
            if number:  # the first steps make buckets, and PowerSGD sends dense ones
                seconds[way] += [max(step) for step in zip(*by_rank, strict=True)][1:]
                sent[way] += max(now - then for now, then in zip(after, before, strict=True)) / (rounds * steps)
    return {way: median(found) for way, found in seconds.items()}, sent
