"""A module on a CUDA device is attached as one on the CPU. Skipped where there is none; ``make gpu-check`` runs it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import geartrain as gt

pytestmark = pytest.mark.cuda

STEPS, MOVED = 6, 3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 5))


def trained(device: str, *, moves_to: str, scales: bool) -> dict[str, Tensor]:
    module = net().to(device)  # momentum: Adam would make steps of the rounding errors of a bias before its norm
    with gt.local(num_shards=2) as cluster:
        dense = gt.attach(module, cluster, name="net", optimizer=gt.Momentum(0.05), dim=128)
        scaler = torch.amp.GradScaler(device, enabled=scales, init_scale=2.0**12)
        for step in range(STEPS):
            if step == MOVED:
                module.to(moves_to)
            place = next(module.parameters()).device
            inputs = torch.randn(32, 20, generator=torch.Generator().manual_seed(step)).to(place)
            dense.zero_grad()
            with torch.autocast(place.type, torch.float16, enabled=scales):
                loss = module(inputs).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(dense)
            scaler.update()
        assert dense.version == 1 + STEPS
        return {name: item.cpu() for name, item in module.state_dict().items()}


@pytest.mark.parametrize("moves_to", ["cuda", "cpu"])
def test_a_module_on_a_device_trains_as_on_the_cpu(moves_to: str) -> None:
    expected = trained("cpu", moves_to="cpu", scales=False)
    for name, found in trained("cuda", moves_to=moves_to, scales=False).items():
        torch.testing.assert_close(found, expected[name], rtol=1e-3, atol=1e-4)


def test_mixed_precision_on_a_device_pushes_unscaled_gradients() -> None:
    expected = trained("cpu", moves_to="cpu", scales=False)
    for name, found in trained("cuda", moves_to="cuda", scales=True).items():
        torch.testing.assert_close(found, expected[name], rtol=5e-2, atol=5e-2, msg=name)
