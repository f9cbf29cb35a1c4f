"""A trained model on disk: what prediction needs, and no cluster. No pickle.

    model/config.json             backbone, preprocessing, class count
    model/backbone.safetensors    parameters
    model/centers.safetensors     class centers [C, D]
    model/classes.json            name of each class

The folder is replaced as a whole: a crash leaves the old one or the new one. What a training needs to go on is in its
snapshots (:mod:`geartrain.workers.job_state`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from geartrain.ams.errors import ConfigError
from geartrain.workers.atomic import complete_folder, replacing_folder, write_json
from geartrain.workers.backbones import StrokeNet, build_backbone
from geartrain.workers.data.bitmaps import Preprocessing

FORMAT = 1


@dataclass(frozen=True)
class Model:
    """What prediction needs."""

    backbone: StrokeNet
    backbone_settings: dict[str, Any]
    """Keyword arguments of the backbone's constructor."""
    centers: Tensor
    """[C, D] float32."""
    class_names: list[str]
    preprocessing: Preprocessing


def save_model(folder: Path, model: Model) -> None:
    """Replace ``folder`` with this model."""
    config = {
        "format": FORMAT,
        "backbone": {"name": "stroke_net", "settings": model.backbone_settings},
        "preprocessing": model.preprocessing.to_json(),
        "num_classes": len(model.class_names),
        "dim": model.centers.shape[1],
        "score": "cosine of feature and class center",
    }
    with replacing_folder(folder) as staging:
        save_file(_on_host(model.backbone.state_dict()), staging / "backbone.safetensors")
        save_file({"centers": model.centers.detach().cpu().contiguous()}, staging / "centers.safetensors")
        for tensors in staging.glob("*.safetensors"):
            tensors.chmod(0o644)  # the library creates them for their owner alone; a model is made to be handed on
        write_json(staging / "classes.json", model.class_names)
        write_json(staging / "config.json", config)


def load_model(folder: Path) -> Model:
    """Read what :func:`save_model` wrote; on the CPU, in eval(). Raises ConfigError naming what is wrong."""
    folder = complete_folder(folder)
    config = _read_json(folder / "config.json")
    if config.get("format") != FORMAT:
        raise ConfigError(f"{folder} has format {config.get('format')!r}; this version reads format {FORMAT}")
    try:
        backbone = build_backbone(config["backbone"]["name"], config["backbone"]["settings"])
        backbone.load_state_dict(_read_tensors(folder / "backbone.safetensors"))
        centers = _read_tensors(folder / "centers.safetensors")["centers"]
        preprocessing = Preprocessing(**config["preprocessing"])
        expected = (config["num_classes"], config["dim"])
    except (KeyError, TypeError, RuntimeError) as exc:
        raise ConfigError(f"{folder} is not a whole model: {exc}") from exc
    names = _read_json(folder / "classes.json")
    if tuple(centers.shape) != expected or len(names) != len(centers):
        raise ConfigError(f"{folder} disagrees with itself: centers {tuple(centers.shape)}, {len(names)} class names")
    return Model(backbone.eval(), config["backbone"]["settings"], centers.float(), names, preprocessing)


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as exc:
        raise ConfigError(f"{path} does not exist; is {path.parent} the model folder of a run?") from exc
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}") from exc


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return {name: torch.as_tensor(tensor) for name, tensor in load_file(path).items()}
    except (OSError, SafetensorError) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}") from exc
