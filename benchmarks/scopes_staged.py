"""Every rank does both parts of a model (fusion), against ranks for each part (staged): step, hot spot, idle time.

Four ranks behind links of 1 Gbit/s, a global batch of 256 samples with 512 features. Computation is a timed wait, for
ranks share the cores of this machine and would not share those of machines of their own: 0.5 ms a sample in the
backbone and 0.5 ms a sample in the whole of the head, twice that backward. (ResNet-50 on a V100 takes about 0.9 ms.)
What travels is real: features, labels, gradients, losses.

Staged, two ranks feed two owners of the split layer, or three feed one. Their step has the backbone and the head one
after the other on some of the ranks each; that of fusion has both on all of them. The hot spot is the link that carries
most, as a multiple of the mean link; idle is a rank that does not compute, the mean over ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _calls import result
from _rank_group import RankGroup, rank_group, why_no_links
from torch import Tensor, nn

import geartrain as gt
from geartrain.launch.bench import Result

RANKS, BITS, GLOBAL, WIDTH, CLASSES = 4, 1e9, 256, 512, 1000
BACKBONE_SECONDS = HEAD_SECONDS = 5e-4
"""Of a sample's forward pass, in one device's backbone and in the head if one device has all of it."""
WAYS: dict[str, list[list[int]] | None] = {
    "fusion": None,
    "staged 2 + 2": [[0, 1], [2, 3]],
    "staged 3 + 1": [[0, 1, 2], [3]],
}
TARGET = 1.3


class _Work:
    """Computation, as a wait of a given length; counts what it waited."""

    seconds = 0.0

    @classmethod
    def do(cls, seconds: float) -> None:
        cls.seconds += seconds
        time.sleep(seconds)


class _Timed(torch.autograd.Function):
    """The tensor as it is, after ``seconds`` of work, and twice as much backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, seconds: float) -> Tensor:
        _Work.do(seconds)
        ctx.seconds = seconds
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _Work.do(2 * ctx.seconds)
        return gradient, None


class Backbone(nn.Module):
    """Features that take a while."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, WIDTH)

    def forward(self, images: Tensor) -> Tensor:
        return _Timed.apply(self.linear(images), BACKBONE_SECONDS * len(images))  # type: ignore[no-untyped-call,no-any-return]


class Side:
    """One rank, with a model for each way."""

    def __init__(self) -> None:
        self.models = {way: self._made(stages) for way, stages in WAYS.items()}
        self.batches = {way: self._batch(stages) for way, stages in WAYS.items()}

    def _made(self, stages: list[list[int]] | None) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(Backbone(), nn.Linear(WIDTH, CLASSES))
        owners = RANKS if stages is None else len(stages[1])

        def loss(logits: Any, labels: Tensor) -> Tensor:
            value = F.cross_entropy(logits, labels)
            return _Timed.apply(value, HEAD_SECONDS * GLOBAL / owners)  # type: ignore[no-untyped-call,no-any-return]

        return gt.parallelize(model, gt.mesh(stages), {"0": gt.Replicate(), "1": gt.Split()}, loss=loss)

    def _batch(self, stages: list[list[int]] | None) -> tuple[Tensor | None, Tensor | None]:
        senders = list(range(RANKS)) if stages is None else stages[0]
        if dist.get_rank() not in senders:
            return None, None
        own = slice(senders.index(dist.get_rank()), GLOBAL, len(senders))
        random = torch.Generator().manual_seed(0)
        images = torch.randn(GLOBAL, 16, generator=random)[own]
        return images, torch.randint(CLASSES, (GLOBAL,), generator=random)[own]

    def turn(self, way: str, steps: int) -> tuple[list[float], float, float]:
        """Seconds of each step, the part of them without computation, and the last loss."""
        model, (images, labels) = self.models[way], self.batches[way]
        _Work.seconds, seconds = 0.0, []
        for _ in range(steps):
            dist.barrier()
            began = time.perf_counter()
            loss = model(images, labels)
            loss.backward()
            seconds.append(time.perf_counter() - began)
        return seconds, 1 - _Work.seconds / sum(seconds), loss.item()


def results(full: bool = False) -> Iterator[Result]:  # noqa: ARG001
    """The cases of ``geartrain bench scopes_staged``."""
    if why := why_no_links():
        print(f"scopes_staged is left out: {why}")
        return
    with rank_group(Side, RANKS, bits_per_second=BITS) as group:
        found = {way: _measured(group, way) for way in WAYS}
    mine, *others = found.values()
    for way, theirs in zip(list(WAYS)[1:], others, strict=True):
        case = f"{RANKS} ranks behind 1 Gbit/s, {GLOBAL} samples, split softmax: "
        yield result(f"{case}a step", mine[0] * 1e3, way, theirs[0] * 1e3, "ms", target=TARGET)
        yield result(f"{case}the mean rank idle", 100 * mine[1], way, 100 * theirs[1], "%", target=None)
        yield result(f"{case}hot spot", mine[2], way, theirs[2], "x the mean link", target=None)
        yield result(f"{case}busiest link, a step", mine[3] / 1e3, way, theirs[3] / 1e3, "kB", target=None)


def _measured(group: RankGroup, way: str) -> tuple[float, float, float, float]:
    """Seconds of a step, idle part, the busiest link's bytes to the mean link's, and those bytes."""
    steps = 20
    group.call("turn", way=way, steps=3)
    before = group.interface_bytes()
    by_rank = group.call("turn", way=way, steps=steps)
    after = group.interface_bytes()
    links = [
        max(now.sent - then.sent, now.received - then.received) / steps for now, then in zip(after, before, strict=True)
    ]
    seconds = median(max(step) for step in zip(*(taken for taken, _, _ in by_rank), strict=True))
    return seconds, mean(idle for _, idle, _ in by_rank), max(links) / mean(links), max(links)
