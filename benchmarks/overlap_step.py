"""A step with features and gradients travelling while the backbone computes, against one that waits for them.

Two ranks of one thread behind links (network namespaces, ``tc tbf``) so slow that communication takes a quarter of the
step that waits. The link is chosen in the run: a fast one tells what a step moves and how long it computes.

A backbone of 0.9 million parameters, which works on 16 patches of an image as a convolution does, in
DistributedDataParallel; a class head of 4,096 classes whose rows the ranks hold; 1,024 samples a rank in four
micro-batches. ``MicroBatches(overlap=False)`` waits for each collective; the other rival is the step without
micro-batches. The same with a split ``nn.Linear`` in place of the head, with micro-batches and without. Sides take
turns on the same ranks; they begin alike and see the same samples, so that their losses must agree.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from _common import result
from _rank_group import RankGroup, rank_group, why_no_links
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import geartrain as gt
from geartrain.ams.values.errors import GeartrainError
from geartrain.launch.bench import Result

SAMPLES, DIM, CLASSES, PARTS = 1024, 1024, 4096, 4
PATCHES, PIXELS, WIDTH = 16, 256, 512
FAST_BITS = 40e9
SHARE = 0.25
"""Of the step that waits, in which it communicates."""
WAYS = ("overlap", "waited for", "one batch")
SPLIT_WAYS = ("split, micro-batches", "split, one batch")
TARGET = 1.15


class WholeBatch(nn.Module):
    """Backbone, then head: what a loop without micro-batches does."""

    def __init__(self, backbone: nn.Module, head: gt.ClassHead) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.head(self.backbone(images), labels)
        return loss


class Backbone(nn.Module):
    """Features [B, DIM] of images [B, PATCHES, PIXELS]."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Sequential(nn.Linear(PIXELS, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.features = nn.Linear(WIDTH, DIM)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.features(self.patches(images).mean(1))
        return features


class Way:
    """One training, from the same beginning as the others."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        backbone = DistributedDataParallel(Backbone())
        head = gt.ClassHead(
            None, "classes", num_classes=CLASSES, dim=DIM, rows="ranks", select=gt.FullSoftmax(), margin=gt.CosFace(16)
        )
        self.rows = gt.RowOptimizer(head)
        self.optimizer = torch.optim.SGD(backbone.parameters(), lr=0.01)
        self.model: nn.Module = WholeBatch(backbone, head)
        if name != "one batch":
            self.model = gt.MicroBatches(backbone, head, PARTS, overlap=name == "overlap")

    def step(self, images: Tensor, labels: Tensor) -> float:
        """Train once; the loss."""
        self.optimizer.zero_grad()
        self.rows.zero_grad()
        loss = self.model(images, labels)
        loss.backward()
        self.optimizer.step()
        self.rows.step()
        return loss.item()


class Linear(nn.Module):
    """The same with a layer instead of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Backbone(), nn.Linear(DIM, CLASSES, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(images))
        return logits


class SplitWay:
    """One training of a split layer."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        scopes = {"backbone": gt.Replicate(), "head": gt.Split()}
        count = PARTS if name == SPLIT_WAYS[0] else 1
        self.model = gt.parallelize(Linear(), gt.mesh(), scopes, loss=nn.CrossEntropyLoss(), micro_batches=count)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def step(self, images: Tensor, labels: Tensor) -> float:
        """Train once; the loss."""
        self.optimizer.zero_grad()
        loss = self.model(images, labels)
        loss.backward()
        self.optimizer.step()
        number: float = loss.item()
        return number


class Side:
    """All ways on one rank."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(dist.get_rank())
        self.images = torch.randn(SAMPLES, PATCHES, PIXELS, generator=random)
        self.labels = torch.randint(CLASSES, (SAMPLES,), generator=random)
        self.ways: dict[str, Way | SplitWay] = {name: Way(name) for name in WAYS}
        self.ways |= {name: SplitWay(name) for name in SPLIT_WAYS}

    def turn(self, way: str, steps: int) -> list[list[float]]:
        """Seconds and loss of each step."""
        done = []
        for _ in range(steps):
            dist.barrier()
            began = time.perf_counter()
            loss = self.ways[way].step(self.images, self.labels)
            done.append([time.perf_counter() - began, loss])
        return done

    def hidden(self, way: str) -> float:
        """Part of the communication of a step beside which this rank computes; only rank 0's answer is of all ranks."""
        with tempfile.TemporaryDirectory() as folder, gt.trace_step(Path(folder) / "step.json") as trace:
            self.ways[way].step(self.images, self.labels)
        return trace.hidden_fraction


def results(full: bool = False) -> Iterator[Result]:  # noqa: ARG001
    """Yield the cases of ``geartrain bench overlap_step``."""
    if why := why_no_links():
        print(f"overlap_step is left out: {why}")
        return
    bits = slow_bits()
    with rank_group(Side, 2, bits_per_second=bits) as group:
        seconds, losses = _turns(group, rounds=4)
        hidden = {way: group.call("hidden", way=way)[0] for way in WAYS[:2]}
    for item, other in ((WAYS[0], WAYS[1]), (WAYS[0], WAYS[2]), SPLIT_WAYS):
        if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(losses[item], losses[other], strict=True)):
            raise GeartrainError(f"losses differ: {losses[item]} {item}, {losses[other]} {other}")
    case = f"2 ranks behind {bits / 1e6:.0f} Mbit/s, {PARTS} micro-batches of {SAMPLES // PARTS}, D = {DIM}: a step"
    ours = seconds["overlap"] * 1e3
    yield result(case, ours, "the same, each collective waited for", seconds["waited for"] * 1e3, "ms", target=TARGET)
    yield result(case, ours, "without micro-batches", seconds["one batch"] * 1e3, "ms", target=None)
    mine, theirs = (1e3 * seconds[way] for way in SPLIT_WAYS)
    split = case.replace("a step", "a step, split nn.Linear")
    yield result(split, mine, SPLIT_WAYS[1], theirs, "ms", target=TARGET)
    case = "communication of that step that is hidden behind computation"
    mine, theirs = (100 * hidden[way] for way in WAYS[:2])
    yield result(case, mine, "each collective waited for", theirs, "%", target=None, more_is_better=True)


def slow_bits() -> float:
    """The rate at which a step that waits communicates for a quarter of its time."""
    with rank_group(Side, 2, bits_per_second=FAST_BITS) as group:
        group.call("turn", way="waited for", steps=1)
        before = [count.sent for count in group.interface_bytes()]
        steps = group.call("turn", way="waited for", steps=3)
        sent = max(after.sent - first for after, first in zip(group.interface_bytes(), before, strict=True)) / 3
    seconds = median(step[0] for step in steps[0])
    return 8 * sent * (1 - SHARE) / (SHARE * seconds)


def _turns(group: RankGroup, rounds: int) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Median seconds of the slower rank, and rank 0's losses, by way; the first round does not count."""
    ways = (*WAYS, *SPLIT_WAYS)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    losses: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way in ways:
            by_rank = group.call("turn", way=way, steps=3)
            losses[way] += [loss for _, loss in by_rank[0]]
            if number:
                seconds[way] += [max(taken for taken, _ in step) for step in zip(*by_rank, strict=True)]
    return {way: median(found) for way, found in seconds.items()}, losses
