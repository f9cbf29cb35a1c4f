"""Third-party backbones: networks of ``timm``, and modules of user code.

Their names have a colon: ``timm:vit_tiny_patch16_224``, or ``package.module:function`` of user code. User code is
imported only if the user names it: no model folder or snapshot can make a process run code.

Legend: B batch, K channels, S side, D width of a feature.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from geartrain.ams.values.errors import ConfigError

TIMM = "timm:"


class FromBitmaps(nn.Module):
    """Wrapper of a float network that also accepts bitmaps as they are stored.

    Bitmaps [B, K, S, S] (uint8, or float in [0, 1]) -> features [B, D]. With ``centred`` the network sees [-1, 1].
    """

    def __init__(self, network: nn.Module, *, centred: bool) -> None:
        super().__init__()
        self.network = network
        self.centred = centred

    def forward(self, bitmaps: Tensor) -> Tensor:
        """Return features [B, D] of bitmaps [B, K, S, S]."""
        images = bitmaps.float().div(255) if bitmaps.dtype == torch.uint8 else bitmaps
        features: Tensor = self.network(images * 2 - 1 if self.centred else images)
        return features


def build_timm(name: str, *, channels: int, image_size: int, dim: int) -> nn.Module:
    """Return a network of ``timm`` with random weights, whose last layer gives the features. Raises ConfigError.

    ``name`` may come from a model's folder, so it must be one of timm's own, not a path or a place in a hub.
    """
    if ":" in name or "/" in name:
        raise ConfigError(f"the backbone {TIMM}{name} is no name of a network of timm, as {TIMM}resnet18")
    try:
        import timm
    except (ImportError, RuntimeError) as exc:  # torchvision raises the latter if it was built for another torch
        raise ConfigError(
            f"the backbone {TIMM}{name} needs timm, which cannot be imported: {exc}; pip install 'geartrain[timm]'"
        ) from exc
    settings: dict[str, Any] = {"pretrained": False, "in_chans": channels, "num_classes": dim}
    try:
        try:  # transformers must know the size, convolutional networks accept any
            network = timm.create_model(name, img_size=image_size, **settings)
        except TypeError:
            network = timm.create_model(name, **settings)
    except (RuntimeError, ValueError, AssertionError, TypeError) as exc:
        raise ConfigError(f"timm makes no backbone {name!r} of {image_size} x {image_size} pixels: {exc}") from exc
    return FromBitmaps(network, centred=True)


def build_own(name: str, *, channels: int, image_size: int, dim: int) -> nn.Module:
    """Return the module that ``package.module:function`` returns for (num_channels, dim, size). Raises ConfigError."""
    module_name, _, function_name = name.partition(":")
    try:
        build = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigError(
            f"the backbone {name!r} cannot be imported: {exc}; give package.module:function, and put its folder on "
            "PYTHONPATH"
        ) from exc
    try:
        network = build(channels, dim, image_size)
    except Exception as exc:
        raise ConfigError(
            f"{name}(num_channels={channels}, dim={dim}, size={image_size}) raised {type(exc).__name__}: {exc}"
        ) from exc
    if not isinstance(network, nn.Module):
        raise ConfigError(f"{name} returned {type(network).__name__}; it must return a torch.nn.Module")
    return FromBitmaps(network, centred=False)


def require_features(backbone: nn.Module, name: str, *, channels: int, image_size: int, dim: int) -> None:
    """Run a backbone on two images of noise; afterwards restore it and the random state.

    Raises ConfigError unless the result is two finite features that can be trained.
    """
    state = {key: value.clone() for key, value in backbone.state_dict().items()}
    was_training = backbone.training
    with torch.random.fork_rng(devices=[]):
        images = torch.rand(2, channels, image_size, image_size)
        try:
            features = backbone.train()(images)
        except Exception as exc:
            raise ConfigError(
                f"the backbone {name!r} fails on images {list(images.shape)} in [0, 1]: {type(exc).__name__}: {exc}"
            ) from exc
    found = f"{features.dtype} {list(features.shape)}" if isinstance(features, Tensor) else type(features).__name__
    if not isinstance(features, Tensor) or features.shape != (2, dim) or not features.is_floating_point():
        raise ConfigError(f"the backbone {name!r} gives {found} for two images; it must give features [2, {dim}]")
    if not bool(torch.isfinite(features).all()):
        raise ConfigError(f"the backbone {name!r} gives features that are not finite for images in [0, 1]")
    if not features.requires_grad:
        raise ConfigError(f"the backbone {name!r} cannot be trained: no gradient reaches a parameter of it")
    backbone.load_state_dict(state)  # of batch norms, too
    backbone.train(was_training)
