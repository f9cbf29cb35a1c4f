"""Residual networks for face recognition, written from the papers.

ArcFace (Deng et al., CVPR 2019, section 3.1) takes He et al.'s networks with three changes: a residual unit is
BN-Conv-BN-PReLU-Conv-BN (Han et al., CVPR 2017), the stem is a 3 x 3 convolution of stride 1 without pooling, so that
112 x 112 pixels become 7 x 7 cells, and the feature is BN-Dropout-FC-BN of all cells.

Legend: B batch, K channels, S side, M maps, D width of a feature.
"""

from __future__ import annotations

from torch import Tensor, nn

STAGES = {"iresnet18": (2, 2, 2, 2), "iresnet50": (3, 4, 14, 3), "iresnet100": (3, 13, 30, 3)}
"""Residual units of the four stages, by name: 24.0, 43.6 and 65.2 million parameters at 112 x 112 and D = 512."""
MAPS = (64, 128, 256, 512)


class _Unit(nn.Module):
    """BN-Conv-BN-PReLU-Conv-BN beside the identity, or a 1 x 1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.PReLU(outputs),
            nn.Conv2d(outputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        changes = stride != 1 or inputs != outputs
        self.shortcut: nn.Module = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs))
            if changes
            else nn.Identity()
        )

    def forward(self, maps: Tensor) -> Tensor:
        added: Tensor = self.body(maps) + self.shortcut(maps)
        return added


class IResNet(nn.Module):
    """Images [B, K, S, S] in [-1, 1] -> features [B, D]. Every stage halves the side."""

    def __init__(
        self, units: tuple[int, ...], *, channels: int = 3, image_size: int = 112, dim: int = 512, dropout: float = 0.0
    ) -> None:
        super().__init__()
        stem = [nn.Conv2d(channels, MAPS[0], 3, padding=1, bias=False), nn.BatchNorm2d(MAPS[0]), nn.PReLU(MAPS[0])]
        body: list[nn.Module] = []
        inputs, side = MAPS[0], image_size
        for outputs, count in zip(MAPS, units, strict=True):
            body += [_Unit(inputs, outputs, 2), *(_Unit(outputs, outputs, 1) for _ in range(count - 1))]
            inputs, side = outputs, (side + 1) // 2
        self.trunk = nn.Sequential(*stem, *body)
        normalise = nn.BatchNorm1d(dim)
        normalise.weight.requires_grad_(False)  # at 1: a head that compares angles ignores the length
        self.feature = nn.Sequential(
            nn.BatchNorm2d(inputs), nn.Dropout(dropout), nn.Flatten(), nn.Linear(inputs * side * side, dim), normalise
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")

    def forward(self, images: Tensor) -> Tensor:
        """Return features [B, D] of images [B, K, S, S] in [-1, 1]."""
        features: Tensor = self.feature(self.trunk(images))
        return features
