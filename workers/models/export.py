"""A trained model as a folder to serve: its backbone as ONNX, unit class centers, names, and what is true of it.

The folder is described in :mod:`.saved_model`. Legend: N images, C classes, K centers of a class, D width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from geartrain.ams.values.errors import ConfigError, InvalidArgument, ModelDamaged
from geartrain.workers.atomic import complete_folder, replacing_folder
from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.models import onnx_backbone
from geartrain.workers.models.saved_model import (
    CENTERS,
    ONNX,
    read_config,
    seal_model,
    sealed_files,
    write_arrays,
)

KIND = "pictures"
Finish = Callable[[Path, Mapping[str, npt.NDArray[np.float32]]], Mapping[str, Any]]
"""Called with the folder and the centers and biases in it: adds files, and returns what config.json says of them."""


class Exportable(Protocol):
    """What is exported: a :class:`geartrain.TrainedModel`."""

    @property
    def backbone(self) -> nn.Module:
        """Images -> features [N, D]."""

    @property
    def centers(self) -> Tensor:
        """[C, D], or [C, K, D]."""

    @property
    def biases(self) -> Tensor | None:
        """[C]."""

    @property
    def class_names(self) -> Sequence[str]:
        """C of them."""

    @property
    def is_cosine(self) -> bool:
        """Whether scores are cosines."""

    @property
    def preprocessing(self) -> Preprocessing | None:
        """How pictures become bitmaps."""

    @property
    def training(self) -> Mapping[str, Any]:
        """What the run says of it."""

    def best(self, features_ND: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Scores and classes [N, k]."""


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written."""

    parity: onnx_backbone.Parity
    config: Mapping[str, Any]
    """Of config.json, without checksums."""


def export_model(
    model: Exportable,
    folder: Path,
    example: onnx_backbone.Inputs | None = None,
    *,
    version: int | None = None,
    finish: Finish | None = None,
) -> Exported:
    """Replace ``folder`` by the model, as a whole, once onnxruntime gives the features of its backbone.

    ``example`` is a batch of images; a model of pictures needs none. ``version`` is the step it is of, one more than
    the version there by default. Raises ConfigError (a library is not installed), InvalidArgument (the backbone cannot
    be exported, or ``folder`` holds anything but an export), OSError (such as a full disk; then the old folder stays).
    """
    version = next_version(folder) if version is None else version
    if example is None:
        example = _random_images(model.preprocessing)
    centers = model.centers.detach().float().cpu()
    rows = (functional.normalize(centers, dim=-1) if model.is_cosine else centers).contiguous().numpy()
    arrays = {"centers": rows} if model.biases is None else {"centers": rows, "biases": model.biases.cpu().numpy()}
    with replacing_folder(folder) as staging:
        parity = onnx_backbone.write_onnx(model.backbone, example, staging / ONNX)
        write_arrays(staging / CENTERS, arrays)
        config = {
            "kind": KIND,
            "version": version,
            "created": time.time(),
            "is_cosine": model.is_cosine,
            "preprocessing": None if model.preprocessing is None else model.preprocessing.to_json(),
            "num_classes": len(model.class_names),
            "dim": centers.shape[-1],
            "precision": "fp32",
            "parity": asdict(parity),
            "training": dict(model.training),
            **({} if finish is None else finish(staging, arrays)),
        }
        seal_model(staging, model.class_names, config)
    return Exported(parity=parity, config=config)


def next_version(folder: Path) -> int:
    """One more than the version there. Raises InvalidArgument unless there is nothing to lose."""
    folder = complete_folder(folder)
    if not folder.exists():
        return 1
    if not folder.is_dir():
        raise InvalidArgument(f"{folder} is a file; a model is exported to a folder")
    there = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    try:
        config = read_config(folder) if there else {}
    except (ConfigError, ModelDamaged):
        config = {}
    foreign = there if "kind" not in config else [name for name in there if name not in sealed_files(config)]
    if foreign:
        raise InvalidArgument(f"{folder} holds other files ({foreign[0]}); give a folder of its own, or a new name")
    return int(config.get("version", 0)) + 1


def _random_images(look: Preprocessing | None) -> Tensor:
    if look is None:
        raise InvalidArgument("example is None; give a batch of images, a tensor [N, ...] with N of 2 or more")
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (4, look.channels, look.size, look.size), generator=generator, dtype=torch.uint8)
