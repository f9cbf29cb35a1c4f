"""A trained model on disk: what prediction needs, and what a resumed training needs besides. No pickle.

    model/config.json             backbone, preprocessing, class count
    model/backbone.safetensors    parameters
    model/centers.safetensors     class centers [C, D]
    model/classes.json            name of each class
    model/training.json           step, stage, recipe
    model/training.safetensors    momentum of the backbone's parameters

The folder is replaced as a whole: a crash leaves the old one or the new one. The centers' optimizer keeps no slots
(SGD), so that these files are the complete state.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
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
from geartrain.workers.recipe import Recipe

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


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a training has come."""

    step: int
    """Updates applied since the beginning."""
    stage_start: int
    """Step at which the current stage began."""
    stage_steps: int
    """Steps of the current stage."""
    table: str
    """Name of the table of class centers."""

    @property
    def is_complete(self) -> bool:
        """Whether the stage has ended."""
        return self.step >= self.stage_start + self.stage_steps


@dataclass(frozen=True)
class TrainingState:
    """What a resumed training needs besides the model."""

    recipe: Recipe
    progress: Progress
    momentum: dict[str, Tensor]
    """Parameter name -> momentum; empty before the first step."""
    data: dict[str, Any]
    """Where the images came from."""


def save_model(folder: Path, model: Model, training: TrainingState) -> None:
    """Replace ``folder`` with this model and training state."""
    config = {
        "format": FORMAT,
        "backbone": {"name": "stroke_net", "settings": model.backbone_settings},
        "preprocessing": model.preprocessing.to_json(),
        "num_classes": len(model.class_names),
        "dim": model.centers.shape[1],
        "score": "cosine of feature and class center",
    }
    state = {"recipe": training.recipe.to_json(), "progress": asdict(training.progress), "data": training.data}
    with replacing_folder(folder) as staging:
        save_file(_on_host(model.backbone.state_dict()), staging / "backbone.safetensors")
        save_file({"centers": model.centers.detach().cpu().contiguous()}, staging / "centers.safetensors")
        save_file(_on_host(training.momentum), staging / "training.safetensors")
        for tensors in staging.glob("*.safetensors"):
            tensors.chmod(0o644)  # the library creates them for their owner alone; a model is made to be handed on
        write_json(staging / "classes.json", model.class_names)
        write_json(staging / "training.json", state)
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


def load_training(folder: Path) -> TrainingState:
    """Read the training state beside a model. Raises ConfigError."""
    folder = complete_folder(folder)
    state = _read_json(folder / "training.json")
    try:
        recipe, progress = Recipe.from_json(state["recipe"]), Progress(**state["progress"])
        return TrainingState(recipe, progress, _read_tensors(folder / "training.safetensors"), state["data"])
    except (KeyError, TypeError) as exc:
        raise ConfigError(f"{folder / 'training.json'} cannot be resumed from: {exc}") from exc


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
