"""On a CUDA device a head trains as it does on the CPU. Skipped where there is none; ``make gpu-check`` runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import geartrain as gt
from tests.support import heads

pytestmark = pytest.mark.cuda

CLASSES, DIM, BATCH, STEPS = 5_000, 64, 32, 5


def trained(device: str, select: gt.FullSoftmax | gt.PartialFC, sub_centers: int) -> tuple[list[float], torch.Tensor]:
    """Losses of a few steps and the backbone's weight after them, in float32 on ``device``."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(STEPS, BATCH, 16, generator=generator)
    labels = torch.randint(CLASSES, (STEPS, BATCH), generator=generator)
    weight = torch.randn(DIM, 16, generator=generator)
    with gt.local(num_shards=2) as cluster:
        loss: dict[str, Any] = {"select": select, "margin": gt.ArcFace(scale=64), "sub_centers": sub_centers}
        rule: dict[str, Any] = {"optimizer": gt.SparseMomentum(lr=0.1), "initializer": gt.Normal(), "seed": 3}
        head = heads.make_head(cluster, "t", num_classes=CLASSES, dim=DIM, **loss, **rule)
        backbone = nn.Linear(16, DIM, bias=False)
        backbone.weight.data.copy_(weight)
        backbone.to(device)
        optimizer, rows = torch.optim.SGD(backbone.parameters(), lr=0.1), gt.RowOptimizer(head)
        losses = []
        for step in range(STEPS):
            loss = head(backbone(features[step].to(device)), labels[step].to(device))
            loss.backward()
            optimizer.step()
            rows.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, backbone.weight.detach().cpu()


@pytest.mark.parametrize("select", [gt.FullSoftmax(), gt.PartialFC(sample_rate=0.2)], ids=["full", "partial"])
@pytest.mark.parametrize("sub_centers", [1, 3])
def test_a_head_on_a_device_trains_as_on_the_cpu(select: gt.FullSoftmax | gt.PartialFC, sub_centers: int) -> None:
    losses, weight = trained("cuda", select, sub_centers)
    expected_losses, expected_weight = trained("cpu", select, sub_centers)
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    torch.testing.assert_close(weight, expected_weight, rtol=1e-3, atol=1e-5)


def test_predictions_on_a_device_are_those_of_the_cpu() -> None:
    features = torch.randn(8, DIM, generator=torch.Generator().manual_seed(5))
    with gt.local() as cluster:
        settings: dict[str, Any] = {"margin": gt.ArcFace(scale=64), "initializer": gt.Normal(std=1.0)}
        head = heads.make_head(cluster, "t", num_classes=CLASSES, dim=DIM, **settings).eval()
        on_cpu, on_device = head.predict(features, 5), head.predict(features.cuda(), 5)
        for expected, found in zip(on_cpu, on_device, strict=True):
            torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-3)
