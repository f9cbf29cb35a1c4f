"""The system of the 100-million-class paper, part by part: images/s of full softmax, and with KNN, overlap and top-k.

Two ranks of one thread with half of a million class centers each (D = 128, momentum), 128 images of noise a rank, the
glyph backbone in DistributedDataParallel; as in the paper's figure 8, each way has all that the ones before it have.
The last one leaves out overlap, to tell what that brings where the features are most of what travels. The link (network
namespaces, ``tc tbf``) is as slow as makes communication a quarter of the step of full softmax: a fast one tells what
that step moves and how long it computes. Ways take turns on the same ranks; the fastest step of each counts, since a
link is as slow in every one.

KNN softmax selects a tenth of the classes by lists of 32 neighbours, of which every class is in as many: a graph of a
million rows takes hours, and the time of a step does not depend on which classes it names (``geartrain bench graph``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch
import torch.distributed as dist
from _common import result
from _rank_group import RankGroup, rank_group, why_no_links
from torch.nn.parallel import DistributedDataParallel

import geartrain as gt
from geartrain.ams.graph.building.neighbours import NeighbourTable
from geartrain.bridge.head.selection.knn_selection import Graph, KNNSelection
from geartrain.launch.bench import Result
from geartrain.workers.models.backbones import build_backbone
from geartrain.workers.recipes.recipe import Recipe

CLASSES, DIM, IMAGES, PARTS, SPARSITY = 1_000_000, 128, 128, 4, 0.999
SELECT = gt.KNNSoftmax(active=0.1, k=32, rebuild="epoch", near=1.0)
FAST_BITS, SHARE = 40e9, 0.25
WAYS = {"full softmax": (1, False), "+ KNN": (1, False), "+ overlap": (PARTS, False), "+ top-k": (PARTS, True)}
"""Name -> micro-batches, beside which rows are written while gradients travel, and whether those are sparsified."""
FULL, LAST, ALONE = "full softmax", "+ top-k", "KNN and top-k"
PAPER = {"+ KNN": 1.2, "+ overlap": 1.042, "+ top-k": 1.162 / 1.042}
"""What each part makes of images/s at 1 M classes: tables 3 and 4, where 1.162 is that of the last two together."""
ALL_ON = 3.9
"""All of them at 100 M classes: figure 8."""


def ring_of_classes(num_classes: int, first: int, stop: int, k: int) -> NeighbourTable:
    """Lists of some classes: the k that follow each in an order drawn at random."""
    order = np.random.default_rng(0).permutation(num_classes).astype(np.int32)
    places = np.argsort(order)[first:stop]
    lists = order[(places[:, None] + np.arange(1, k + 1)) % num_classes]
    return NeighbourTable(np.arange(stop - first + 1, dtype=np.int64) * k, lists.ravel(), k, first, num_classes)


class Way:
    """One training."""

    def __init__(self, name: str, head: gt.ClassHead) -> None:
        torch.manual_seed(0)
        settings = {"channels": 1, "image_size": Recipe().look.size, "dim": DIM, "width": Recipe().width}
        backbone = DistributedDataParallel(build_backbone("stroke_net", settings))
        self.rows = gt.RowOptimizer(head)
        parts, is_sparsified = {**WAYS, ALONE: (1, True)}[name]
        self.optimizer = torch.optim.SGD(backbone.parameters(), lr=0.01, momentum=0.0 if is_sparsified else 0.9)
        self.model, self.overlaps = gt.MicroBatches(backbone, head, parts), parts > 1
        if is_sparsified:
            gt.TopKGradients(sparsity=SPARSITY, momentum=0.9).attach(backbone, self.optimizer)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Train once."""
        self.optimizer.zero_grad()
        self.rows.zero_grad()
        loss = self.model(images, labels)
        if self.overlaps:
            self.rows.step_in_backward(loss)
        loss.backward()
        self.optimizer.step()
        if not self.overlaps:
            self.rows.step()


class Side:
    """All ways on one rank; those with KNN share their class centers."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        self.random = torch.Generator().manual_seed(dist.get_rank())
        self.num_classes = num_classes
        full, knn = (
            gt.ClassHead(
                None,
                name,
                num_classes=num_classes,
                dim=DIM,
                rows="ranks",
                select=select,
                margin=gt.ArcFace(scale=64),
                optimizer=gt.SparseMomentum(lr=0.1, momentum=0.9),
            )
            for name, select in (("full", gt.FullSoftmax()), ("knn", SELECT))
        )
        assert isinstance(knn.select, KNNSelection)
        own = num_classes // dist.get_world_size()
        first = own * dist.get_rank()
        knn.select.graph = Graph(ring_of_classes(num_classes, first, first + own, SELECT.k), version=1, step=0)
        self.ways = {name: Way(name, full if name == FULL else knn) for name in (*WAYS, ALONE)}

    def turn(self, way: str, steps: int) -> list[float]:
        """Seconds of each step."""
        seconds = []
        for _ in range(steps):
            side = Recipe().look.size
            images = torch.rand(IMAGES, 1, side, side, generator=self.random)
            labels = torch.randint(self.num_classes, (IMAGES,), generator=self.random)
            dist.barrier()
            began = time.perf_counter()
            self.ways[way].step(images, labels)
            seconds.append(time.perf_counter() - began)
        return seconds


def results(full: bool = False) -> Iterator[Result]:
    """Yield the cases of ``geartrain bench system``; ``full`` takes five times as many turns."""
    if why := why_no_links():
        print(f"system is left out: {why}")
        return
    with rank_group(Side, 2, bits_per_second=FAST_BITS) as group:
        bits = _slow_bits(group)
        group.limit(bits)
        seconds, sent = _turns(group, rounds=15 if full else 3)
    rates = {way: 2 * IMAGES / seconds[way] for way in seconds}
    sizes = f"{CLASSES:,} classes, D={DIM}, 2 ranks of {IMAGES} behind {bits / 1e6:.0f} Mbit/s"

    def faster(way: str, rival: str, factor: float, *, is_target: bool = True) -> Result:
        case = f"{way} ({sent[way] / 1e3:,.0f} kB sent a step; the paper's factor: {factor:.2f}), {sizes}"
        target = factor if is_target else None
        return result(case, rates[way], rival, rates[rival], "images/s", target=target, more_is_better=True)

    for before, way in pairwise(WAYS):
        yield faster(way, before, PAPER[way])
    yield faster(LAST, FULL, ALL_ON)
    yield faster(LAST, ALONE, PAPER["+ overlap"], is_target=False)


def _slow_bits(group: RankGroup) -> float:
    """The rate at which the step of full softmax communicates for a quarter of its time."""
    for way in (*WAYS, ALONE):
        group.call("turn", way=way, steps=1)  # the graph is cut, optimizers make their state
    seconds, sent = _measured(group, FULL, 5)
    return 8 * sent * (1 - SHARE) / (SHARE * min(seconds))


def _turns(group: RankGroup, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of the fastest step, and bytes that a rank sends in one, by way."""
    seconds, sent = dict.fromkeys((*WAYS, ALONE), math.inf), dict[str, float]()
    for _ in range(rounds):
        for way in seconds:
            taken, sent[way] = _measured(group, way, 2 if way == FULL else 4)
            seconds[way] = min(seconds[way], *taken)
    return seconds, sent


def _measured(group: RankGroup, way: str, steps: int) -> tuple[list[float], float]:
    """Seconds of each step on the slower rank, and bytes that a rank sends in one."""
    before = [count.sent for count in group.interface_bytes()]
    by_rank = group.call("turn", way=way, steps=steps)
    sent = max(count.sent - first for count, first in zip(group.interface_bytes(), before, strict=True))
    return [max(step) for step in zip(*by_rank, strict=True)], sent / steps
