"""The folder of a trained model: what prediction needs, and no cluster. No pickle.

    model/config.json             backbone, preprocessing, whether scores are cosines, checksums (XXH3) of all the files
    model/backbone.safetensors    parameters; or, of an export, backbone.onnx (:mod:`.onnx_backbone`)
    model/centers.safetensors     class centers [C, D], of several a class [C, K, D], and, where there are some, biases
                                  [C], float32; a class's score is the cosine of feature and center ("is_cosine"), or,
                                  without a margin, their product
    model/classes.json            name of each class

The folder is replaced as a whole: a crash leaves the old one or the new one. What a training needs to go on is in its
snapshots (:mod:`geartrain.workers.job.state`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

from geartrain.ams.storage.snapshot.manifest import seal_json
from geartrain.ams.values.errors import ConfigError, ModelDamaged
from geartrain.bridge.checkpoint.folder import FORMAT, read_sealed
from geartrain.workers.atomic import complete_folder, write_json

BACKBONE, ONNX = "backbone.safetensors", "backbone.onnx"
CONFIG, CENTERS, CLASSES = "config.json", "centers.safetensors", "classes.json"
_CHUNK_BYTES = 1 << 20
_AGAIN = "train on: 'geartrain worker ... --resume RUN' saves the model anew at its end"
_EXPORT_AGAIN = "export the model again"


@dataclass(frozen=True)
class ModelFiles:
    """What was read of such a folder, all but the backbone."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    """``centers`` and, where there are some, ``biases``."""
    class_names: list[str]

    @property
    def is_onnx(self) -> bool:
        """Whether the backbone is one of ONNX."""
        return is_exported(self.folder)


def is_exported(folder: Path) -> bool:
    """Whether the backbone of the model there is one of ONNX."""
    return (complete_folder(folder) / ONNX).exists()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of ``tensors``, wherever they are."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


def seal_model(staging: Path, backbone: str, class_names: Sequence[str], config: Mapping[str, Any]) -> None:
    """Write the names and ``config`` with the checksums of all files; ``backbone`` and centers are there already."""
    for tensors in staging.glob("*.safetensors"):
        tensors.chmod(0o644)  # the library creates them for their owner alone; a model is made to be handed on
    write_json(staging / CLASSES, list(class_names))
    checksums = {name: _checksum(staging / name) for name in (backbone, CENTERS, CLASSES)}
    (staging / CONFIG).write_bytes(seal_json({**config, "format": FORMAT, "xxh3_128_of": checksums}))


def unseal_model(folder: Path) -> ModelFiles:
    """Read what :func:`seal_model` wrote, in ``folder`` or in the ``model`` of a run's folder.

    Raises ConfigError (not the folder of a model, or one of another format), ModelDamaged (names the file).
    """
    folder = complete_folder(folder)
    inside = complete_folder(folder / "model")
    if inside.is_dir() and not (folder / CONFIG).exists():
        folder = inside
    config = _read_config(folder)
    for name in (ONNX if is_exported(folder) else BACKBONE, CENTERS, CLASSES):
        _require_checksum(folder / name, config["xxh3_128_of"].get(name))
    names = json.loads((folder / CLASSES).read_text(encoding="utf-8"))
    return ModelFiles(folder, config, load_file(folder / CENTERS), names)


def read_training(folder: Path) -> dict[str, Any]:
    """What the model in ``folder`` says of its training; nothing if there is no whole model. Reads one small file."""
    try:
        training: dict[str, Any] = _read_config(complete_folder(folder)).get("training", {})
    except (ConfigError, ModelDamaged):
        return {}
    return training


def _again(folder: Path) -> str:
    return _EXPORT_AGAIN if is_exported(folder) else _AGAIN


def _read_config(folder: Path) -> dict[str, Any]:
    return read_sealed(folder / CONFIG, f"is {folder} the model folder of a run?", _again(folder))


def _require_checksum(path: Path, expected: str | None) -> None:
    try:
        found = _checksum(path)
    except FileNotFoundError as exc:
        raise _damaged(path, "is missing") from exc
    except OSError as exc:
        raise _damaged(path, f"cannot be read: {exc}") from exc
    if found != expected:
        raise _damaged(path, f"is damaged: its content does not match its checksum in {CONFIG}")


def _damaged(path: Path, what: str) -> ModelDamaged:
    return ModelDamaged(f"{path} {what}; bring it back from a copy, or {_again(path.parent)}")


def _checksum(path: Path) -> str:
    """XXH3 (128 bits) of a file, as hexadecimal digits."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
