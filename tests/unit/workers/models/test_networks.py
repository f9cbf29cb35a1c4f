"""Backbones of a person's own, and those of timm."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from geartrain.ams.values.errors import ConfigError
from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.models.backbones import build_backbone
from geartrain.workers.models.networks import require_features
from geartrain.workers.models.trained_model import TrainedModel, load_model, save_model

SETTINGS = {"channels": 3, "image_size": 16, "dim": 4}
OWN = """
import torch
from torch import nn

def build(num_channels, dim, size):
    maps = nn.Sequential(nn.Conv2d(num_channels, 2, 3), nn.BatchNorm2d(2), nn.Flatten())
    return nn.Sequential(*maps, nn.Linear(2 * (size - 2) ** 2, dim))

def wide(num_channels, dim, size):
    return build(num_channels, dim + 1, size)

def frozen(num_channels, dim, size):
    return build(num_channels, dim, size).requires_grad_(False)

def endless(num_channels, dim, size):
    network = build(num_channels, dim, size)
    nn.init.constant_(network[3].weight, float("inf"))
    return network

def grey(num_channels, dim, size):
    return build(1, dim, size)

def number(num_channels, dim, size):
    return 3

def broken(num_channels, dim, size):
    raise ValueError("no such size")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "faces_of_mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "faces_of_mine", raising=False)
    return "faces_of_mine"


def tried(name: str) -> nn.Module:
    backbone = build_backbone(name, SETTINGS, own=name)
    require_features(backbone, name, **SETTINGS)
    return backbone


def test_a_module_of_ones_own_is_tried_and_left_as_it_was(own: str) -> None:
    torch.manual_seed(3)
    name = f"{own}:build"
    backbone = build_backbone(name, SETTINGS, own=name).eval()
    before = {key: value.clone() for key, value in backbone.state_dict().items()}
    state = torch.get_rng_state()
    require_features(backbone, name, **SETTINGS)
    assert not backbone.training and torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[key]) for key, value in backbone.state_dict().items())
    bitmaps = torch.randint(0, 255, (5, 3, 16, 16), dtype=torch.uint8)
    torch.testing.assert_close(backbone(bitmaps), backbone(bitmaps.float() / 255))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("wide", r"gives torch.float32 \[2, 5\] for two images; it must give features \[2, 4\]"),
        ("frozen", "cannot be trained"),
        ("endless", "not finite"),
        ("grey", r"fails on images \[2, 3, 16, 16\]"),
        ("number", "returned int; it must return a torch.nn.Module"),
        ("broken", r"\(num_channels=3, dim=4, size=16\) raised ValueError: no such size"),
        ("absent", "cannot be imported"),
    ],
)
def test_what_is_no_backbone_is_refused_before_training(own: str, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tried(f"{own}:{name}")
    with pytest.raises(ConfigError, match=r"cannot be imported.*PYTHONPATH"):
        tried("no_such_package:build")


def test_a_saved_model_runs_no_code_that_the_person_has_not_named(own: str, tmp_path: Path) -> None:
    name = f"{own}:build"
    look = Preprocessing(kind="photo", size=16, channels=3)
    network = tried(name).eval()
    made = TrainedModel(
        backbone=network,
        backbone_settings=SETTINGS,
        centers=torch.eye(2, 4),
        class_names=["a", "b"],
        preprocessing=look,
        backbone_name=name,
    )
    save_model(tmp_path / "model", made)
    del sys.modules[own]
    with pytest.raises(ConfigError, match=f"if you trust it, say so: --backbone {name}"):
        load_model(tmp_path / "model")
    with pytest.raises(ConfigError, match="if you trust it"):
        load_model(tmp_path / "model", backbone="os:system")
    assert own not in sys.modules
    loaded = load_model(tmp_path / "model", backbone=name)
    bitmaps = torch.randint(0, 255, (2, 3, 16, 16), dtype=torch.uint8)
    assert torch.equal(loaded.backbone(bitmaps), network(bitmaps))


def test_networks_of_timm_are_told_the_size_if_they_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def create_model(name: str, **settings: Any) -> nn.Module:
        asked.append(settings)
        if name == "cnn" and "img_size" in settings:
            raise TypeError("unexpected keyword argument 'img_size'")
        if name == "none":
            raise RuntimeError("Unknown model (none)")
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, settings["num_classes"]))

    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(create_model=create_model))
    for name in ("vit", "cnn"):
        backbone = tried(f"timm:{name}")
        assert backbone(torch.zeros(2, 3, 16, 16, dtype=torch.uint8)).shape == (2, 4)
    assert [settings.get("img_size") for settings in asked] == [16, 16, None]
    assert not any(settings["pretrained"] for settings in asked)
    for place in ("hf-hub:somebody/model", "local-dir:/tmp/model"):
        with pytest.raises(ConfigError, match="is no name of a network of timm"):
            tried(f"timm:{place}")
    with pytest.raises(ConfigError, match="timm makes no backbone 'none'"):
        tried("timm:none")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ConfigError, match=r"pip install 'geartrain\[timm\]'"):
        tried("timm:vit")


@pytest.mark.parametrize(("name", "size"), [("vit_tiny_patch16_224", 32), ("resnet18", 32)])
def test_a_network_of_timm_gives_features(name: str, size: int) -> None:
    try:
        import timm  # noqa: F401
    except (ImportError, RuntimeError) as exc:
        pytest.skip(f"timm cannot be imported: {exc}")
    settings = {"channels": 3, "image_size": size, "dim": 4}
    require_features(build_backbone(f"timm:{name}", settings), name, **settings)
