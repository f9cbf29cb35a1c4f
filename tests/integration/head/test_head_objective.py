"""Ranks with unequal batches train backbone and rows by one objective: that of one worker with the joint batch.

Backbones are under DDP or FSDP2, rows in every place, ranks processes (gloo); the truth is plain PyTorch in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import geartrain as gt
from tests.integration.conftest import ServedCluster
from tests.support import heads
from tests.support.rank_processes import run_ranks
from tests.support.reference import UNIT_SGD, plain_logits

CLASSES, DIM, INPUTS, BATCH = 23, 6, 5, 12
FULL: list[list[slice]] = [[slice(0, 9), slice(9, BATCH)]]
"""Of each micro-batch the samples of each rank."""
WRAPS = ["ddp", "fsdp2"]
PLACES: dict[str, dict[str, Any]] = {
    **heads.PLACES,
    "late": {"rows": "ranks", "late": True},
    "fused": {"rows": "ranks", "late": True, "fused": True},
}


@dataclass(frozen=True)
class Case:
    settings: dict[str, Any] = field(default_factory=dict)
    shares: list[list[slice]] = field(default_factory=lambda: FULL)
    ignored: tuple[int, ...] = ()
    weights: bool = False
    """Whether samples have some: rank 1 has none of them in "mixed"."""
    mixed: bool = False
    micro: int = 1
    """Of ``gt.MicroBatches``."""
    compiled: bool = False
    parallel: bool = False
    """Whether ``gt.parallelize`` replicates backbone and head as one model, in place of DDP."""

    @property
    def reduction(self) -> str:
        return str(self.settings.get("reduction", "mean"))

    def joint(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(4)
        inputs = torch.randn(BATCH, INPUTS, generator=generator)
        labels = torch.randint(CLASSES, (BATCH,), generator=generator)
        labels[list(self.ignored)] = -100
        weights = 0.5 + 3 * torch.rand(BATCH, generator=generator) if self.weights else torch.ones(BATCH)
        if self.mixed:
            weights[9:] = 1.0
        return inputs, labels, weights


CASES = {
    "ignored labels": Case(ignored=(0, 1, 2, 3, 4, 5, 6, 10)),
    "one rank without any": Case(ignored=(9, 10, 11)),
    "a shorter last batch": Case({"margin": gt.ArcFace(16, 0.3)}),
    "an empty batch": Case(shares=[[slice(0, BATCH), slice(0, 0)]]),
    "smoothed labels": Case({"label_smoothing": 0.2}, ignored=(1, 10)),
    "weights": Case(weights=True, ignored=(3,)),
    "weights on one rank": Case(weights=True, mixed=True),
    "sum": Case({"reduction": "sum"}, ignored=(9, 10)),
    "weighted sum": Case({"reduction": "sum"}, weights=True),
    "none": Case({"reduction": "none"}, ignored=(9, 10), weights=True),
    "accumulated": Case(ignored=(1,), shares=[[slice(0, 5), slice(5, 6)], [slice(6, 7), slice(7, BATCH)]]),
    "micro-batches": Case({"margin": gt.CosFace(8, 0.2)}, ignored=(2, 11), micro=3),
    "weights of micro-batches": Case(weights=True, micro=2),
    "compiled": Case(ignored=(9, 10), compiled=True),
    "parallelized": Case(ignored=(9, 10), parallel=True),
}


def backbone() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(INPUTS, 8), nn.Tanh(), nn.Linear(8, DIM))


def expected(case: Case, rows: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
    """Loss of each micro-batch, gradient of the backbone and of the rows."""
    network, w = backbone().double(), rows.double().requires_grad_()
    inputs, labels, weights = case.joint()
    losses = []
    for micro in case.shares:
        mine = torch.cat([torch.arange(BATCH)[share] for share in micro])
        x, targets, counts = network(inputs[mine].double()), labels[mine], weights[mine].double()
        kept = targets != -100
        logits = plain_logits(x[kept], w, targets[kept], getattr(case.settings.get("margin"), "combined", None))
        smoothing = case.settings.get("label_smoothing", 0.0)
        each = F.cross_entropy(logits, targets[kept], reduction="none", label_smoothing=smoothing) * counts[kept]
        loss = each.sum() if case.reduction == "sum" else each.sum() / counts[kept].sum()
        loss.backward()
        losses.append(loss.detach())
    assert w.grad is not None
    return losses, flat([parameter.grad for parameter in network.parameters()]), w.grad


class Whole(nn.Module):
    """Backbone and head."""

    def __init__(self, net: nn.Module, head: gt.ClassHead) -> None:
        super().__init__()
        self.net, self.head = net, head

    def forward(self, inputs: Tensor, labels: Tensor, weight: Tensor | None = None) -> Tensor:
        loss: Tensor = self.head(self.net(inputs), labels, weight)
        return loss


def flat(gradients: list[Any]) -> Tensor:
    whole = [gradient.full_tensor() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
    return torch.cat([gradient.double().reshape(-1) for gradient in whole])


@contextmanager
def syncing(model: nn.Module, last: bool) -> Iterator[None]:
    if not hasattr(model, "set_requires_gradient_sync"):
        with nullcontext() if last else model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(last)  # type: ignore[operator]
    yield


def step(case: Case, head: gt.ClassHead, model: nn.Module, rank: int) -> list[Tensor]:
    """Of the micro-batches the losses that this rank has."""
    inputs, labels, weights = case.joint()
    whole: Any = Whole(model, head) if case.micro == 1 else gt.MicroBatches(model, head, case.micro)
    if case.parallel:
        whole = lambda inputs, labels, weight: model((inputs,), labels)  # noqa: E731, ARG005
    if case.compiled:
        whole = torch.compile(whole, backend="eager")
    losses = []
    for number, micro in enumerate(case.shares):
        mine = micro[rank]
        weight = weights[mine] if case.weights and not (case.mixed and rank == 1) else None
        with syncing(model, number == len(case.shares) - 1):
            if case.reduction == "none":
                counts = weights[mine] * (labels[mine] != -100)
                loss = gt.mean_over_ranks(whole(inputs[mine], labels[mine]), counts)
            else:
                loss = whole(inputs[mine], labels[mine], weight)
            loss.backward()
        losses.append(loss.detach())
    return losses


def train_rank(rank: int, folder: Path, place: str, address: str | None) -> None:
    found: dict[str, Any] = {}
    with nullcontext() if address is None else gt.connect(address) as cluster:
        for number, (name, case) in enumerate(CASES.items()):
            for wrap in WRAPS:
                head = heads.make_head(
                    cluster,
                    f"{wrap}{number}",
                    num_classes=CLASSES,
                    dim=DIM,
                    select=gt.FullSoftmax(),
                    optimizer=UNIT_SGD,
                    initializer=gt.Normal(std=0.5),
                    sync=address is not None,
                    **PLACES[place],
                    **case.settings,
                )
                net = backbone()
                model: nn.Module
                if case.parallel:
                    model = gt.parallelize(Whole(net, head), gt.mesh(), {"": gt.Replicate(shard=wrap != "ddp")})
                else:
                    model = DistributedDataParallel(net) if wrap == "ddp" else fully_shard(net)
                rows, before = gt.RowOptimizer(head), head.weights()
                losses = step(case, head, model, rank)
                dense = flat([parameter.grad for parameter in net.parameters()])
                rows.step()
                dist.barrier()
                change = (before - head.weights()).double()
                dist.barrier()
                found[f"{name}, {wrap}"] = losses, dense, before, change
    torch.save(found, folder / f"{rank}.pt")


@pytest.mark.parametrize("place", PLACES)
def test_backbone_and_rows_follow_the_mean_of_the_joint_batch(place: str, tmp_path: Path) -> None:
    served = None if PLACES[place]["rows"] == "ranks" else ServedCluster(2)
    try:
        run_ranks(train_rank, 2, tmp_path, place, None if served is None else served.address)
    finally:
        if served is not None:
            served.stop()
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for name, case in CASES.items():
        for key in (f"{name}, {wrap}" for wrap in WRAPS):
            losses, dense, before, change = first[key]
            wanted = expected(case, before)
            assert losses == second[key][0], key  # the same number on every rank
            for mine, theirs in zip([*losses, dense, change], [*wanted[0], *wanted[1:]], strict=True):
                error = float((mine.double() - theirs).abs().max() / theirs.abs().max())
                assert error < 5e-4, (key, error)
