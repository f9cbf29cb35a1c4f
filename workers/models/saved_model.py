"""Folder of a trained model: its files for prediction and serving, without cluster or pickle, read without torch.

    model/config.json             sealed: facts of the model, and checksums (XXH3) of all the other files
    model/backbone.safetensors    of a worker's model: parameters of the network that config.json names
    model/backbone.onnx           of an export: the network itself (:mod:`.onnx_backbone`)
    model/centers.safetensors     class centers [C, D], of several a class [C, K, D], and, where there are some, biases
                                  [C], float32; a class's score is the cosine of feature and center ("is_cosine"), or,
                                  without a margin, their product. Of an export with cosines they have unit length.
                                  Where some classes do not live: ids [C] int64 of those that do
    model/names.safetensors       name of each class: offsets [C + 1] int64 into text [B] uint8, UTF-8
    model/index.*                 of an export, if it has one: the nearest-neighbor index
    model/pictures.safetensors    of an export, if it has some: example pictures of classes (``class_pictures``)

config.json of an export has ``kind`` (its inputs: ``pictures`` or ``tensors``; other kinds have other files),
``version`` (ascends: the training step of a run, or the last version plus one if that is higher), ``created`` (Unix
time), ``preprocessing`` (None: the backbone takes tensors; a string: user code makes them), ``is_cosine``,
``num_classes``, ``dim``, ``precision`` of the backbone, ``parity`` (difference of onnxruntime's features from torch's)
and ``index``; if measured, ``sure_from`` (the score below which an answer is unsure) and ``verify`` (the cosine above
which two pictures show the same). Centers and names are mapped: processes share them, and a million are available at
once.

The folder is replaced atomically: a crash leaves the old one or the new one. The state to resume a training is in its
snapshots (:mod:`geartrain.workers.job.state`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import xxhash

from geartrain.ams.storage.sealed import read_sealed
from geartrain.ams.storage.snapshot.manifest import seal_json
from geartrain.ams.storage.tensor_file import map_tensors, tensor_file
from geartrain.ams.values.errors import ConfigError, ModelDamaged
from geartrain.workers.atomic import complete_folder

BACKBONE, ONNX = "backbone.safetensors", "backbone.onnx"
CONFIG, CENTERS, NAMES = "config.json", "centers.safetensors", "names.safetensors"
FORMAT = 1
_SUMS = "xxh3_128_of"
TYPES = {
    "float": "float32",
    "double": "float64",
    "float16": "float16",
    "bool": "bool",
    **{f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
}
"""Types of inputs by onnxruntime's names, as numpy dtypes."""
_CHUNK_BYTES = 1 << 20
_AGAIN = "train on: 'geartrain worker ... --resume RUN' saves the model anew at its end"
_EXPORT_AGAIN = "export the model again"


class ClassNames(Sequence[str]):
    """Names of classes by number, each decoded on access."""

    def __init__(self, offsets: npt.NDArray[Any], text: npt.NDArray[Any]) -> None:
        """``offsets`` [C + 1] int64 and ``text`` [B] uint8: as :meth:`arrays` returns them."""
        self._offsets = offsets
        self._text = text

    @staticmethod
    def arrays(names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
        """Return the arrays of a file of names."""
        encoded = [name.encode("utf-8", "surrogatepass") for name in names]
        offsets = np.zeros(len(encoded) + 1, np.int64)
        np.cumsum([len(name) for name in encoded], out=offsets[1:])
        return {"offsets": offsets, "text": np.frombuffer(b"".join(encoded), np.uint8)}

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        start, stop = int(self._offsets[place]), int(self._offsets[place + 1])
        return self._text[start:stop].tobytes().decode("utf-8", "surrogatepass")

    def several(self, places: Sequence[int]) -> list[str]:
        """Return the names at ``places``, none of them negative."""
        offsets, names = self._offsets, []
        for place in places:
            name = self._text[offsets[place] : offsets[place + 1]]
            names.append(name.tobytes().decode("utf-8", "surrogatepass"))
        return names


@dataclass(frozen=True)
class ModelFiles:
    """Content of a model folder, without the backbone. Arrays are mapped and must not be changed."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, npt.NDArray[Any]]
    """``centers`` and, if there are any, ``biases``."""
    class_names: ClassNames

    @property
    def is_onnx(self) -> bool:
        """Whether the backbone is ONNX."""
        return ONNX in self.config[_SUMS]


def is_exported(folder: Path) -> bool:
    """Return whether the model in the folder is an export; False: it is a worker's."""
    return not (complete_folder(folder) / BACKBONE).exists()


def write_arrays(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write arrays to a file that :func:`map_arrays` maps."""
    with path.open("wb") as file:
        for part in tensor_file(arrays, {}):
            file.write(part)


def seal_model(staging: Path, class_names: Sequence[str], config: Mapping[str, Any]) -> None:
    """Write the names, and ``config`` with the checksums of all files in the folder (:func:`seal_folder`)."""
    write_arrays(staging / NAMES, ClassNames.arrays(class_names))
    seal_folder(staging, config)


def seal_folder(staging: Path, config: Mapping[str, Any]) -> None:
    """Write ``config`` with the checksums of all files in the folder and in its subfolders."""
    files = sorted(path for path in staging.rglob("*") if path.is_file())
    for path in files:
        path.chmod(0o644)  # some libraries create files for their owner alone; others read a model, too
    checksums = {path.relative_to(staging).as_posix(): _checksum(path) for path in files}
    (staging / CONFIG).write_bytes(seal_json({**config, "format": FORMAT, _SUMS: checksums}))


def sealed_files(config: Mapping[str, Any]) -> set[str]:
    """Return the files of a folder with this config.json, itself included."""
    return {CONFIG, *config[_SUMS]}


def read_config(folder: Path) -> dict[str, Any]:
    """Return the content of config.json; other files are not checked. Raises as :func:`unseal_folder`."""
    return read_sealed(folder / CONFIG, FORMAT, f"is {folder} the model folder of a run?", _again(folder))


def unseal_folder(folder: Path) -> dict[str, Any]:
    """Check that every other file has its checksum; return the content of config.json.

    Raises ConfigError (not the folder of a model, or one of another format), ModelDamaged (names the file).
    """
    config = read_config(folder)
    for name, expected in config[_SUMS].items():
        _require_checksum(folder / name, expected)
    return config


def numbered_versions(folder: Path) -> list[Path]:
    """Return the models in a folder of versions, ``folder/000120``, newest first."""
    inside = [path for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []
    found = sorted((path for path in inside if (path / CONFIG).exists()), key=lambda path: int(path.name))
    return found[::-1]


def unseal_model(folder: Path) -> ModelFiles:
    """Read a model that :func:`seal_model` wrote: ``folder``, the ``model`` of a run's folder, or the newest version.

    Raises as :func:`unseal_folder`.
    """
    folder = complete_folder(folder)
    if not (folder / CONFIG).exists():
        inside = complete_folder(folder / "model")
        folder = inside if inside.is_dir() else next(iter(numbered_versions(folder)), folder)
    return read_files(folder, unseal_folder(folder))


def read_files(folder: Path, config: dict[str, Any]) -> ModelFiles:
    """Read the centers and names of a folder with this checked config.json. Raises ModelDamaged."""
    for name in (CENTERS, NAMES):
        if name not in config[_SUMS]:
            raise _damaged(folder / name, "is missing")
    return ModelFiles(folder, config, map_arrays(folder / CENTERS), ClassNames(**map_arrays(folder / NAMES)))


def read_training(folder: Path) -> dict[str, Any]:
    """Return the training entry of the model in ``folder``; empty if there is no sound one. Reads only config.json."""
    try:
        training: dict[str, Any] = read_config(complete_folder(folder)).get("training", {})
    except (ConfigError, ModelDamaged):
        return {}
    return training


def step_of(training: Mapping[str, Any]) -> int | None:
    """Return the step of a model, from its training entry; None if it has none."""
    step: int | None = training["best"]["step"] if "best" in training else training.get("step")
    return step


def _again(folder: Path) -> str:
    return _EXPORT_AGAIN if is_exported(folder) else _AGAIN


def map_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Map a file that :func:`write_arrays` wrote. Raises ModelDamaged."""
    try:
        return map_tensors(path)
    except FileNotFoundError as exc:
        raise _damaged(path, "is missing") from exc
    except (OSError, ValueError) as exc:
        raise _damaged(path, f"cannot be read: {exc}") from exc


def _require_checksum(path: Path, expected: str) -> None:
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
    """Return the XXH3 (128 bits) of a file, as hexadecimal digits."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
