"""A trained model on disk: what prediction needs, and no cluster. No pickle.

    model/config.json             backbone, preprocessing, class count, checksums (XXH3) of all the files
    model/backbone.safetensors    parameters
    model/centers.safetensors     class centers [C, D], of several a class [C, K, D]; a class's score is their cosine
                                  with the feature, or, without a margin, their product: "score" in config.json says
                                  which
    model/classes.json            name of each class

The folder is replaced as a whole: a crash leaves the old one or the new one. What a training needs to go on is in its
snapshots (:mod:`geartrain.workers.job.state`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from geartrain.ams.storage.snapshot.manifest import seal_json, unseal_json
from geartrain.ams.values.errors import ConfigError, ModelDamaged
from geartrain.ams.values.text import other_format
from geartrain.bridge.head.class_head import ClassHead
from geartrain.bridge.head.weights import write_centers
from geartrain.workers.atomic import complete_folder, replacing_folder, write_json
from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.models.backbones import build_backbone

FORMAT = 1
_CONFIG = "config.json"
_BACKBONE, _CENTERS, _CLASSES = "backbone.safetensors", "centers.safetensors", "classes.json"
_FILES = (_BACKBONE, _CENTERS, _CLASSES)
_TENSOR = "centers"
"""In the file of that name."""
COSINE, PRODUCT = "cosine of feature and class center", "product of feature and class center"
_CHUNK_BYTES = 1 << 20
_AGAIN = "train on: 'geartrain worker ... --resume RUN' saves the model anew at its end"
_REMEDY = f"bring it back from a copy, or {_AGAIN}"


@dataclass(frozen=True)
class Model:
    """What prediction needs."""

    backbone: nn.Module
    """Bitmaps [B, K, S, S] uint8 -> features [B, D]."""
    backbone_settings: dict[str, Any]
    """Keyword arguments of the backbone's constructor."""
    centers: Tensor
    """[C, D] float32; [C, K, D] of several centers a class, of which the best one counts."""
    class_names: list[str]
    preprocessing: Preprocessing
    is_cosine: bool = True
    """Whether a class's score is the cosine of feature and center, as under a margin, or their product."""
    backbone_name: str = "stroke_net"
    """See :func:`geartrain.workers.models.backbones.build_backbone`."""
    training: dict[str, Any] = field(default_factory=dict)
    """What the run that wrote it says of it, as plain values; see :mod:`geartrain.workers.classify.best`."""


def save_model(folder: Path, model: Model, centers: Path | None = None) -> None:
    """Replace ``folder`` with this model.

    Its centers may be on the meta device if they are in the file ``centers``, which becomes part of the folder.
    """
    config = {
        "format": FORMAT,
        "backbone": {"name": model.backbone_name, "settings": model.backbone_settings},
        "preprocessing": model.preprocessing.to_json(),
        "num_classes": len(model.class_names),
        "dim": model.centers.shape[-1],
        "score": COSINE if model.is_cosine else PRODUCT,
        "training": model.training,
    }
    with replacing_folder(folder) as staging:
        save_file(_on_host(model.backbone.state_dict()), staging / _BACKBONE)
        if centers is None:
            save_file({_TENSOR: model.centers.detach().cpu().contiguous()}, staging / _CENTERS)
        else:
            centers.replace(staging / _CENTERS)
        for tensors in staging.glob("*.safetensors"):
            tensors.chmod(0o644)  # the library creates them for their owner alone; a model is made to be handed on
        write_json(staging / _CLASSES, model.class_names)
        checksums = {name: checksum(staging / name) for name in _FILES}
        (staging / _CONFIG).write_bytes(seal_json({**config, "xxh3_128_of": checksums}))


def save_model_of_head(folder: Path, model: Model, head: ClassHead, *, is_first: bool) -> None:
    """Replace ``folder`` with this model, its centers the rows of ``head``; ``model.centers`` are on the meta device.

    Every rank calls it, the first one writes. Rows travel and are written 8 MiB at a time, so that no rank needs memory
    for all of them. Raises what :func:`geartrain.bridge.head.weights.export_class_weights` does.
    """
    centers = folder.with_name(f".{folder.name}.centers.part.safetensors")
    try:
        if is_first or head.backend.local is not None:
            write_centers(head, centers, _TENSOR)
        if is_first:
            save_model(folder, model, centers)
    finally:
        if is_first:
            centers.unlink(missing_ok=True)


def load_model(folder: Path, *, backbone: str | None = None) -> Model:
    """Read what :func:`save_model` wrote, in ``folder`` or in the ``model`` of a run's folder; on the CPU, in eval().

    A backbone of the person's own (``package.module:function``) is imported only if it is named as ``backbone``.

    Raises ConfigError (not the folder of a model, or one of another format), ModelDamaged (names the file).
    """
    folder = _of_run(complete_folder(folder))
    config = _read_config(folder / _CONFIG)
    try:
        for name in _FILES:
            _require_checksum(folder / name, config["xxh3_128_of"][name])
        name, settings = config["backbone"]["name"], config["backbone"]["settings"]
        network = build_backbone(name, settings, own=backbone)
        network.load_state_dict(_read_tensors(folder / _BACKBONE))
        centers = _read_tensors(folder / _CENTERS)[_TENSOR]
        preprocessing = Preprocessing(**config["preprocessing"])
        names = json.loads((folder / _CLASSES).read_text(encoding="utf-8"))
    except (KeyError, TypeError, RuntimeError, OSError, ValueError, SafetensorError) as exc:
        raise ConfigError(f"{folder} is not a model of this version of Geartrain: {exc}") from exc
    training = config.get("training", {})
    is_cosine = config["score"] != PRODUCT
    return Model(network.eval(), settings, centers.float(), names, preprocessing, is_cosine, name, training)


def read_training(folder: Path) -> dict[str, Any]:
    """What the model in ``folder`` says of its training; nothing if there is no whole model. Reads one small file."""
    try:
        training: dict[str, Any] = _read_config(complete_folder(folder) / _CONFIG).get("training", {})
    except (ConfigError, ModelDamaged):
        return {}
    return training


def _of_run(folder: Path) -> Path:
    """The model in the folder of a run, or ``folder`` itself."""
    inside = complete_folder(folder / "model")
    return inside if inside.is_dir() and not (folder / _CONFIG).exists() else folder


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _read_config(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except FileNotFoundError as exc:
        raise ConfigError(f"{path} does not exist; is {path.parent} the model folder of a run?") from exc
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc}") from exc
    try:
        config = unseal_json(data)
    except ValueError as exc:
        raise ModelDamaged(f"{path} is damaged: {exc}; {_REMEDY}") from exc
    if config.get("format") != FORMAT:
        raise ConfigError(f"{path} {other_format(config.get('format'), FORMAT)}, or {_AGAIN}")
    return config


def _require_checksum(path: Path, expected: str) -> None:
    try:
        found = checksum(path)
    except FileNotFoundError as exc:
        raise ModelDamaged(f"{path} is missing; {_REMEDY}") from exc
    except OSError as exc:
        raise ModelDamaged(f"{path} cannot be read: {exc}; {_REMEDY}") from exc
    if found != expected:
        raise ModelDamaged(f"{path} is damaged: its content does not match its checksum in {_CONFIG}; {_REMEDY}")


def checksum(path: Path) -> str:
    """XXH3 (128 bits) of a file, as hexadecimal digits."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _read_tensors(path: Path) -> dict[str, Tensor]:
    return {name: torch.as_tensor(tensor) for name, tensor in load_file(path).items()}
