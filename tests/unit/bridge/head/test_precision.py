"""Sixteen bits everywhere: a float16 network, its rows and momentum in float32, float16 or bfloat16, a scaled loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from geartrain.ams.client.factory import local
from geartrain.ams.programs.selection import PartialFC
from geartrain.ams.values.optimizers.registry import SparseMomentum
from geartrain.ams.values.specs import DTypeName, Normal
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.loss.config import HeadConfig
from geartrain.bridge.head.loss.margins.angular import ArcFace
from geartrain.bridge.rows.optimizer import RowOptimizer

CLASSES, DIM, INPUTS, BATCH, STEPS = 60, 16, 12, 32, 80
TOLERANCES: dict[DTypeName, float] = {"float32": 0.002, "float16": 0.002, "bfloat16": 0.005}
"""How far the mean loss of the first 20 steps may be from that of float32 throughout: 11 bits of a row, and 8. Rounding
is all that differs there; later it is the path that a training takes, whatever turned it."""


class Network(nn.Module):
    """In ``dtype``, but for the batch norm."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.last = nn.Linear(INPUTS, 32), nn.BatchNorm1d(32), nn.Linear(32, DIM)
        self.to(dtype)
        self.norm.float()
        self.dtype = dtype

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(inputs.to(self.dtype)).float())
        features: torch.Tensor = self.last(torch.relu(hidden).to(self.dtype))
        return features


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy copies of a point of each class."""
    points = torch.randn(CLASSES, INPUTS, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(step + 1)
    labels = torch.randint(CLASSES, (BATCH,), generator=generator)
    return points[labels] + 0.3 * torch.randn(BATCH, INPUTS, generator=generator), labels


def train(cluster: Any, network: torch.dtype, dtype: DTypeName) -> tuple[np.ndarray, Network, ClassHead]:
    """Mean losses [STEPS]; the network's float32 masters and the rows are stepped through one GradScaler."""
    net = Network(network)
    head = ClassHead(
        cluster,
        "classes",
        num_classes=CLASSES,
        dim=DIM,
        select=PartialFC(0.5),
        margin=ArcFace(16, 0.2),
        optimizer=SparseMomentum(lr=0.2, momentum=0.9, weight_decay=1e-4),
        rows="ranks" if cluster is None else "pull",
        config=HeadConfig(dtype=dtype, slot_dtype=dtype),
        initializer=Normal(std=0.1),
    )
    masters = [parameter.detach().float().clone().requires_grad_() for parameter in net.parameters()]
    dense, rows = torch.optim.SGD(masters, lr=0.2, momentum=0.9), RowOptimizer(head)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=20)
    losses = []
    for step in range(STEPS):
        inputs, labels = batch(step)
        loss = head(net(inputs), labels)
        scaler.scale(loss).backward()
        for master, parameter in zip(masters, net.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        scaler.step(dense)
        scaler.step(rows)
        scaler.update()
        net.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(masters, net.parameters(), strict=True):
                parameter.copy_(master)
        losses.append(float(loss.detach()))
    assert head.step == STEPS  # nothing overflowed
    assert scaler.get_scale() == 2.0 ** (10 + STEPS // 20)
    return np.array(losses), net, head


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads would wait for one another longer than these sizes compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def single() -> np.ndarray:
    """Losses in float32 throughout."""
    return train(None, torch.float32, "float32")[0]


@pytest.mark.parametrize(
    ("network", "dtype", "place"),
    [
        (torch.float16, "float32", "ranks"),
        (torch.float16, "float16", "ranks"),
        (torch.float16, "float16", "pull"),
        (torch.bfloat16, "bfloat16", "ranks"),
    ],
    ids=["fp16 network, fp32 rows", "pure fp16", "pure fp16 in a cluster", "pure bf16"],
)
def test_sixteen_bits_train_as_float32_does(
    network: torch.dtype, dtype: DTypeName, place: str, single: np.ndarray
) -> None:
    if place == "ranks":
        losses, net, head = train(None, network, dtype)
    else:
        with local(num_shards=2) as cluster:
            losses, net, head = train(cluster, network, dtype)
            assert torch.isfinite(head.weights()).all()
    assert np.isfinite(losses).all()
    assert losses[-10:].mean() < 0.1 * losses[:5].mean()
    assert losses[:20].mean() == pytest.approx(single[:20].mean(), rel=TOLERANCES[dtype])
    assert losses[-10:].mean() == pytest.approx(single[-10:].mean(), rel=0.1)
    assert {str(parameter.dtype) for parameter in (net.first.weight, net.last.weight)} == {str(network)}
    assert net.norm.weight.dtype == net.norm.running_mean.dtype == torch.float32  # type: ignore[union-attr]
    spec = head.table.spec
    assert (spec.dtype, spec.slot_dtype) == (dtype, dtype)
