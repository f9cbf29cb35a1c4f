"""Fusion (every rank works on every part) against stages on ranks of their own, with six ranks, as in Whale's text.

What devices of their own would compute is slept: a fixed time a sample, forward once and backward twice as long, since
six ranks have no six cores here. Values, messages and their links are real: features of 2,048 numbers, a link of
1 Gbit/s for each rank, the same 96 samples of all ranks in each step. So the figures are of the schedule and of the
network alone: of ranks that wait, and of the busiest link, at which features of all senders arrive point to point
where fusion all-gathers them.

Seconds are those of the slowest rank, bytes what the busiest rank receives in a step by its interface, headers
included.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from _common import result
from _rank_group import rank_group, why_no_links
from torch import Tensor, nn

import geartrain as gt
from geartrain.launch.bench import Result

RANKS, SAMPLES, WIDTH, DIM, CLASSES, LR = 6, 96, 64, 2048, 60, 0.1
BODY, NECK, HEAD = 2e-3, 1e-3, 1e-3
"""Seconds that a sample takes forward on one device; that of the head is divided among the ranks that hold it."""
BITS = 1e9
FUSION = "fusion"
Way = tuple[list[list[int]] | None, int]
TWO, THREE = [[0, 1, 2, 3], [4, 5]], [[0, 1, 2], [3, 4], [5]]
WAYS: dict[str, Way] = {
    FUSION: (None, 1),
    "2 stages": (TWO, 1),
    "2 stages, 4 micro-batches": (TWO, 4),
    "3 stages": (THREE, 1),
    "3 stages, 4 micro-batches": (THREE, 4),
}


class _Slept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Device(nn.Module):
    """Takes as long as layers would on a device."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, rows: Tensor) -> Tensor:
        """The rows, later."""
        slept: Tensor = _Slept.apply(rows, self.seconds * len(rows))
        return slept


class HeadLoss(nn.CrossEntropyLoss):
    """Takes as long as the head would on the devices that hold it."""

    def __init__(self, holders: int) -> None:
        super().__init__()
        self.seconds = HEAD * SAMPLES / holders

    def forward(self, logits: Any, labels: Tensor) -> Tensor:
        """The loss, later."""
        loss: Tensor = _Slept.apply(super().forward(logits, labels), self.seconds)
        return loss


class Classifier(nn.Module):
    """The model that all ways train."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), Device(BODY))
        self.neck = nn.Sequential(nn.Linear(WIDTH, DIM), Device(NECK))
        self.head = nn.Linear(DIM, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        logits: Tensor = self.head(self.neck(self.body(images)))
        return logits


class Side:
    """All ways on one rank."""

    def __init__(self) -> None:
        self._ways = {name: _trained(*way) for name, way in WAYS.items()}

    def turn(self, way: str, steps: int) -> tuple[list[float], float]:
        """Seconds of each step, and the last loss."""
        model, optimizer = self._ways[way]
        stages, rank, seconds = model.mesh.stages, model.mesh.rank, []
        senders = stages[0] if stages else tuple(range(RANKS))
        images = labels = None
        if rank in senders:
            random = torch.Generator().manual_seed(7)
            images = torch.randn(SAMPLES, WIDTH, generator=random)[senders.index(rank) :: len(senders)]
            labels = torch.randint(CLASSES, (SAMPLES,), generator=random)[senders.index(rank) :: len(senders)]
        for _ in range(steps):
            dist.barrier()
            began = time.perf_counter()
            loss = model(images, labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - began)
        return seconds, loss.item()


def _trained(stages: list[list[int]] | None, micro_batches: int) -> tuple[gt.ParallelModel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    neck = gt.Replicate(stage=1 if stages is not None and len(stages) == 3 else None)
    scopes = {"body": gt.Replicate(), "neck": neck, "head": gt.Split()}
    loss = HeadLoss(RANKS if stages is None else len(stages[-1]))
    model = gt.parallelize(Classifier(), gt.mesh(stages), scopes, loss=loss, micro_batches=micro_batches)
    return model, torch.optim.SGD(model.parameters(), lr=LR)


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench stages``."""
    if why := why_no_links():
        print(f"stages are left out: {why}")
        return
    rounds, steps = (6, 4) if full else (3, 2)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    received = dict.fromkeys(WAYS, 0.0)
    losses: dict[str, float] = {}
    with rank_group(Side, RANKS, bits_per_second=BITS) as group:
        for number in range(rounds + 1):
            for way in WAYS:
                before = [count.received for count in group.interface_bytes()]
                by_rank = group.call("turn", way=way, steps=steps)
                after = [count.received for count in group.interface_bytes()]
                losses[way] = by_rank[0][1]
                if number:  # the first steps connect ranks
                    seconds[way] += [max(step) for step in zip(*(times for times, _ in by_rank), strict=True)]
                    received[way] += max(b - a for a, b in zip(before, after, strict=True)) / (rounds * steps)
    assert max(losses.values()) - min(losses.values()) < 1e-3, losses  # all ways are one training
    rate = {way: SAMPLES / median(found) for way, found in seconds.items()}
    case = f"{RANKS} ranks, D = {DIM:,}, {BITS / 1e9:.0f} Gbit/s, {SAMPLES} samples a step: fusion"
    for way in [way for way in WAYS if way != FUSION]:
        yield result(case, rate[FUSION], way, rate[way], "samples/s", more_is_better=True)
    for way in [way for way in WAYS if way != FUSION]:
        yield result(f"{case}, received by the busiest rank", received[FUSION] / 1e3, way, received[way] / 1e3, "kB")
