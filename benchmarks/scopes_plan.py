"""How near the expected step of a plan comes to the measured one, over the cases of the other parallel benches.

Hardware is measured by ``gt.Hardware.measure()`` on the same ranks, behind the same links; then each case is planned
and trained in the same processes. "Ours" is the expected step, the rival the measured one; the ratio is 1 less their
distance over the measured one, so that 0.8 is an error of 20 %.

Two ranks of one thread: a softmax over a million classes on loopback, replicated and split (``scopes_whale``); 25
million parameters behind 1 Gbit/s, dense and top-k (``topk_link``); a step in micro-batches that waits, and one that
does not, behind the link that ``overlap_step`` finds (``overlap_step``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from statistics import median
from typing import Any

import overlap_step
import topk_link
import torch
import torch.distributed as dist
from _rank_group import RankGroup, rank_group, why_no_links
from scopes_whale import Classifier
from torch import Tensor, nn

import geartrain as gt
from geartrain.bridge.parallel.plan.build import request_for
from geartrain.bridge.parallel.plan.costs.skeleton import skeleton_of
from geartrain.bridge.parallel.plan.plan import Plan
from geartrain.bridge.parallel.scopes import Scope
from geartrain.launch.bench import Result

CLASSES, DIM, SAMPLES, LR = 1_000_000, 128, 16, 0.1
TARGET = 0.8
WARM_STEPS = 8
WHALE: Mapping[str, Mapping[str, Scope]] = {
    "replicated": {"": gt.Replicate()},
    "split": {"backbone": gt.Replicate(), "head": gt.Split()},
}
LINK = {"dense": None, "top-k 0.999": 0.999}
OVERLAP = ("waited for", "overlap")


class Side:
    """One rank; it has one training at a time."""

    def __init__(self) -> None:
        self._step: Callable[[], object] | None = None
        self._plan: Plan | None = None
        self._hardware: gt.Hardware | None = None
        self._random = torch.Generator().manual_seed(dist.get_rank())

    def measure_hardware(self) -> dict[str, Any]:
        """Of these ranks."""
        self._hardware = gt.Hardware.measure()
        return self._hardware.to_dict()

    def prepare(self, case: str, way: str) -> float:
        """Make a training; the expected seconds of its step."""
        self._step = None
        getattr(self, f"_prepare_{case}")(way)
        assert self._plan is not None
        return self._plan.step_without_overlap.seconds if way == "waited for" else self._plan.step.seconds

    def turn(self, steps: int) -> list[float]:
        """Seconds of each step but the first ones, which make buckets, kept memory and estimates."""
        assert self._step is not None
        seconds = []
        for _ in range(WARM_STEPS + steps):
            dist.barrier()
            began = time.perf_counter()
            self._step()
            seconds.append(time.perf_counter() - began)
        return seconds[WARM_STEPS:]

    def _prepare_whale(self, way: str) -> None:
        images = torch.randn(SAMPLES, DIM, generator=self._random)
        labels = torch.randint(CLASSES, (SAMPLES,), generator=self._random)
        with torch.device("meta"):
            model = Classifier(CLASSES)
        parallel = gt.parallelize(model, gt.mesh(), WHALE[way], loss=nn.CrossEntropyLoss())
        optimizer = torch.optim.SGD(parallel.parameters(), lr=LR)

        def step() -> None:
            parallel(images, labels).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        self._plan = parallel.plan_for(self._hardware, lambda own: torch.optim.SGD(own, lr=LR))
        self._step = step

    def _prepare_link(self, way: str) -> None:
        trained = topk_link.Way("DDP" if LINK[way] is None else "top-k")
        inputs = torch.randn(topk_link.SAMPLES, topk_link.WIDTH, generator=self._random)
        self._step = lambda: trained.step(inputs)
        momentum = 0.0 if LINK[way] else topk_link.MOMENTUM  # which the hook has, then
        ddp: Any = trained.model
        self._plan = self._planned(
            _Squared(ddp.module), {"": gt.Replicate()}, inputs, momentum=momentum, sparsity=LINK[way]
        )

    def _prepare_overlap(self, way: str) -> None:
        trained = overlap_step.Way(way)
        count = overlap_step.SAMPLES
        images = torch.randn(count, overlap_step.PATCHES, overlap_step.PIXELS, generator=self._random)
        labels = torch.randint(overlap_step.CLASSES, (count,), generator=self._random)
        self._step = lambda: trained.step(images, labels)
        parts: Any = trained.model
        self._plan = self._planned(
            overlap_step.WholeBatch(parts.backbone.module, parts.head),
            {"backbone": gt.Replicate(), "head": gt.Split()},
            (images, labels),
            micro_batches=overlap_step.PARTS,
        )

    def _planned(
        self, model: nn.Module, scopes: Mapping[str, Scope], example: Any, *, momentum: float = 0.0, **settings: Any
    ) -> Plan:
        assert self._hardware is not None
        made: dict[str, Any] = {"batch": None, "loss": None, **settings}
        return request_for(
            skeleton_of(model),
            scopes,
            dist.get_world_size(),
            self._hardware,
            example,
            optimizer=lambda own: torch.optim.SGD(own, lr=LR, momentum=momentum),
            **made,
        ).plan()


class _Squared(nn.Module):
    """The loss of ``topk_link``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        loss: Tensor = self.model(inputs).square().mean()
        return loss


def results(full: bool = False) -> Iterator[Result]:  # noqa: ARG001
    """The cases of ``geartrain bench scopes_plan``."""
    with rank_group(Side, 2, timeout_seconds=600) as group:
        yield from _cases(group, "whale", WHALE, f"{CLASSES:,} classes, 2 ranks, loopback: ", steps=4)
    if why := why_no_links():
        print(f"links of scopes_plan are left out: {why}")
        return
    with rank_group(Side, 2, bits_per_second=topk_link.BITS) as group:
        yield from _cases(group, "link", LINK, "25 million parameters, 2 ranks, 1 Gbit/s: ", steps=8)
    bits = overlap_step.slow_bits()
    with rank_group(Side, 2, bits_per_second=bits) as group:
        where = f"micro-batches, ClassHead on 2 ranks, {bits / 1e6:.0f} Mbit/s: "
        yield from _cases(group, "overlap", OVERLAP, where, steps=8)


def _cases(group: RankGroup, case: str, ways: Any, where: str, steps: int) -> Iterator[Result]:
    group.call("measure_hardware")
    for way in ways:
        expected = max(group.call("prepare", case=case, way=way))
        measured = median(max(step) for step in zip(*group.call("turn", steps=steps), strict=True))
        yield {
            "case": f"{where}a step, {way}",
            "ours": expected * 1e3,
            "rival": "measured",
            "theirs": measured * 1e3,
            "unit": "ms expected",
            "ratio": 1 - abs(expected - measured) / measured,
            "target": TARGET,
        }
