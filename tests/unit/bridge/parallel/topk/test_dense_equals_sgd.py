"""With sparsity 0 the hook is plain DDP with SGD's own momentum, however the loop is written."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from geartrain.bridge.parallel.topk.hook import TopKGradients
from tests.support.rank_processes import on_ranks

STEPS = 5
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "nesterov, weight decay": {"sgd": {"nesterov": True, "weight_decay": 0.1}},
    "accumulated, views": {"micro_batches": 2, "ddp": {"gradient_as_bucket_view": True}},
    "unused parameters": {"ddp": {"find_unused_parameters": True}, "skips": True, "sgd": {"weight_decay": 0.1}},
    "static graph": {"ddp": {"static_graph": True}},
    "channels last": {"channels_last": True, "sgd": {"weight_decay": 0.1}},
}


class Network(nn.Module):
    """Two ways through it; some parameters may take no part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.picture = nn.Conv2d(2, 4, 3)
        self.one = nn.Linear(16, 6)
        self.other = nn.Linear(16, 6)

    def forward(self, pictures: Tensor, way: int) -> Tensor:
        features = torch.tanh(self.picture(pictures)).flatten(1)
        layers = [self.one, self.other] if way == 2 else [(self.one, self.other)[way]]
        return torch.stack([layer(features) for layer in layers]).sum(0)


def trained(rank: int, case: dict[str, Any], sgd: dict[str, Any], topk: TopKGradients | None) -> list[Tensor]:
    network = Network().double()
    if case.get("channels_last"):
        network.to(memory_format=torch.channels_last)
    # Three buckets, which DDP makes anew after the first step.
    model = DistributedDataParallel(network, bucket_cap_mb=0.001, **case.get("ddp", {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **sgd)
    if topk is not None:
        topk.attach(model, optimizer)
    random = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        optimizer.zero_grad()
        # Used by both ranks, by one of them, by none.
        way = (step + rank * (step % 3 == 0)) % 2 if case.get("skips") else 2
        micro_batches = case.get("micro_batches", 1)
        for number in range(micro_batches):
            pictures = torch.randn(3, 2, 4, 4, generator=random, dtype=torch.float64)
            with model.no_sync() if number + 1 < micro_batches else contextlib.nullcontext():
                model(pictures, way).square().sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in network.parameters()]


@on_ranks(1, 2)
def test_with_sparsity_0_parameters_are_those_of_sgd_with_momentum(rank: int) -> None:
    for name, case in CASES.items():
        settings = case.get("sgd", {})
        expected = trained(rank, case, {"momentum": 0.9, **settings}, None)
        topk = TopKGradients(sparsity=0, momentum=0.9, **settings)
        for mine, theirs in zip(trained(rank, case, {}, topk), expected, strict=True):
            torch.testing.assert_close(
                mine, theirs, rtol=1e-12, atol=1e-12, msg=lambda said, name=name: f"{name}: {said}"
            )
        assert topk.steps == STEPS
        assert set(topk.traffic.calls) <= {"all-reduce", "all-gather"}
