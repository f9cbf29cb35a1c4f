"""The networks of face recognition have the shapes and sizes of the papers."""

import pytest
import torch
from torch import nn

from geartrain.workers.models.backbones import build_backbone
from geartrain.workers.models.iresnet import STAGES, IResNet


@pytest.mark.parametrize(("name", "millions"), [("iresnet18", 24.0), ("iresnet50", 43.6), ("iresnet100", 65.2)])
def test_parameters_and_shapes_are_those_of_the_papers(name: str, millions: float) -> None:
    with torch.device("meta"):
        net = IResNet(STAGES[name])
        maps = net.trunk(torch.empty(2, 3, 112, 112))
        assert net.feature(maps).shape == (2, 512)
    assert round(sum(parameter.numel() for parameter in net.parameters()) / 1e6, 1) == millions
    assert maps.shape == (2, 512, 7, 7)
    assert not any(isinstance(module, nn.MaxPool2d | nn.ReLU) for module in net.modules())
    unit = [type(part).__name__ for part in net.trunk[3].body]  # type: ignore[union-attr,arg-type]
    assert unit == ["BatchNorm2d", "Conv2d", "BatchNorm2d", "PReLU", "Conv2d", "BatchNorm2d"]
    convolutions = sum(isinstance(module, nn.Conv2d) and module.kernel_size == (3, 3) for module in net.modules())
    assert convolutions == 2 * sum(STAGES[name]) + 1


@pytest.mark.parametrize(("channels", "size"), [(1, 32), (3, 40)])
def test_bitmaps_of_any_size_become_features(channels: int, size: int) -> None:
    torch.manual_seed(0)
    net = build_backbone("iresnet18", {"channels": channels, "image_size": size, "dim": 24}).eval()
    bitmaps = torch.randint(0, 255, (2, channels, size, size), dtype=torch.uint8)
    with torch.no_grad():
        features = net(bitmaps)
        assert features.shape == (2, 24) and bool(torch.isfinite(features).all())
        torch.testing.assert_close(features, net(bitmaps.float() / 255))
