"""A classifier split over ranks against data parallel, and with the batch grown into the memory that this frees.

Whale's comparison at the size of two cores: a softmax of D = 128 behind a small backbone, 16 samples a rank, one thread
a rank, SGD; data parallel is PyTorch's DistributedDataParallel, with gradients that are views of its buckets, its
faster way. The grown batch is the largest whose plan takes no more memory of a rank than data parallel does, at most
128 samples. The bound of the split step is its arithmetic alone on as many ranks at once: three matrix products,
softmax and SGD of the own rows, in memory that is there already.

More ranks than cores share these: 1, 3 and 4 ranks (``--full``) tell how work and messages grow, not how fast machines
of their own would be.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _common import result
from _rank_group import RankGroup, rank_group
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import geartrain as gt
from geartrain.launch.bench import Result

DIM, SAMPLES, MAX_SAMPLES, LR = 128, 16, 128, 0.1
TARGETS = {1_000_000: (3.0, 0.8)}
"""By classes: split to data parallel, split to its bound."""
Step = Callable[[Tensor, Tensor], Any]


class Classifier(nn.Module):
    """The model that all sides train."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
        self.head = nn.Linear(DIM, classes, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(images))
        return logits


class Side:
    """One rank; it has one model at a time, for together they would not fit."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.batch = SAMPLES
        self._step: Step | None = None
        self._random = torch.Generator().manual_seed(dist.get_rank())

    def prepare(self, way: str) -> int:
        """Make a side's model anew; samples of a rank in its step."""
        self._step, self.batch = None, SAMPLES
        if way == "arithmetic":
            self._step = _arithmetic(self.classes)
            return self.batch
        torch.manual_seed(0)
        mesh = gt.mesh()
        model: nn.Module
        if way == "data parallel":
            model = DistributedDataParallel(Classifier(self.classes), gradient_as_bucket_view=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=LR)
            self._step = lambda images, labels: _train(optimizer, F.cross_entropy(model(images), labels))
            return self.batch
        with torch.device("meta"):
            model = Classifier(self.classes)
        scopes = {"backbone": gt.Replicate(), "head": gt.Split()}
        split = gt.parallelize(model, mesh, scopes, loss=nn.CrossEntropyLoss())
        optimizer = torch.optim.SGD(split.parameters(), lr=LR)
        self._step = lambda images, labels: _train(optimizer, split(images, labels))
        if way == "grown":
            self._once()
            plan = split.plan_for(gt.Hardware.named("a100"), lambda own: torch.optim.SGD(own, lr=LR))
            whole = plan.changed(scopes={"": gt.Replicate()})
            sizes = range(1, MAX_SAMPLES + 1)
            self.batch = bisect_right(sizes, whole.rank_bytes, key=lambda batch: plan.changed(batch=batch).rank_bytes)
        return self.batch

    def _once(self) -> None:
        assert self._step is not None
        images = torch.randn(self.batch, DIM, generator=self._random)
        self._step(images, torch.randint(self.classes, (self.batch,), generator=self._random))

    def turn(self, steps: int) -> list[float]:
        """Seconds of each step but the first."""
        seconds = []
        for _ in range(steps + 1):
            dist.barrier()
            began = time.perf_counter()
            self._once()
            seconds.append(time.perf_counter() - began)
        return seconds[1:]


def _train(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def _arithmetic(classes: int) -> Step:
    """The step on the own rows of the samples of all ranks, nothing else."""
    ranks = dist.get_world_size()
    rows = -(-classes // ranks)
    weight = torch.randn(rows, DIM) * 0.05
    gradient = torch.empty_like(weight)
    logits = torch.empty(ranks * SAMPLES, rows)

    def step(images: Tensor, labels: Tensor) -> None:
        features, places = images.repeat(ranks, 1), labels.repeat(ranks)[:, None] % rows
        torch.mm(features, weight.t(), out=logits)
        torch.softmax(logits, 1, out=logits)
        logits.scatter_add_(1, places, torch.full_like(places, -1.0, dtype=logits.dtype))
        torch.mm(logits, weight)
        torch.mm(logits.t(), features, out=gradient)
        weight.add_(gradient, alpha=-LR / len(features))

    return step


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench scopes_whale``."""
    for ranks in (1, 2, 3, 4) if full else (2,):
        for classes in (10_000, 100_000, 1_000_000):
            yield from _case(ranks, classes, rounds=2 if classes == 1_000_000 else 4)


def _case(ranks: int, classes: int, rounds: int) -> Iterator[Result]:
    ways = ["data parallel", "split", "grown", "arithmetic"] if ranks > 1 else ["data parallel", "split", "arithmetic"]
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    batch: dict[str, int] = {}
    with rank_group(Side, ranks, {"classes": classes}, timeout_seconds=600) as group:
        for _ in range(rounds):
            for way in ways:
                batch[way] = min(group.call("prepare", way=way))
                seconds[way] += _steps(group, steps=4 if classes == 1_000_000 else 8)
    rate = {way: ranks * batch[way] / median(seconds[way]) for way in ways}
    to_rival, to_bound = TARGETS.get(classes, (None, None)) if ranks == 2 else (None, None)
    case = f"{classes:,} classes, {ranks} ranks, D = {DIM}, {SAMPLES} a rank: "
    theirs = rate["data parallel"]
    for way in ("split", "grown")[: len(ways) - 2]:
        name = way if way == "split" else f"split, batch grown to {batch[way]} a rank"
        target = to_rival if way == "split" else None
        yield result(case + name, rate[way], "DDP", theirs, "samples/s", target=target, more_is_better=True)
    bound = rate["arithmetic"]
    rival = "its arithmetic alone"
    yield result(case + "split", rate["split"], rival, bound, "samples/s", target=to_bound, more_is_better=True)


def _steps(group: RankGroup, steps: int) -> list[float]:
    """Of the slowest rank."""
    return [max(step) for step in zip(*group.call("turn", steps=steps), strict=True)]
