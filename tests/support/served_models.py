"""Exported models of pictures, as ``geartrain export RUN --to DIR`` writes them."""

from __future__ import annotations

import base64
import functools
import io
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from geartrain.workers.atomic import replacing_folder
from geartrain.workers.data.bitmaps import Preprocessing
from geartrain.workers.models.export import export_model, next_version
from geartrain.workers.models.saved_model import CONFIG, seal_folder, unseal_folder
from geartrain.workers.models.trained_model import TrainedModel
from tests.support.picture_models import picture_model

NAMES = ["a", "b", "漢", "", "e\n", "f", "g", "h"]


def require_onnx() -> None:
    """Skip a test without the extra."""
    for library in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(library, reason="needs pip install 'geartrain[onnx]'")


def small_model(*, seed: int = 2, sub_centers: int = 1, is_cosine: bool = True, dim: int = 16) -> TrainedModel:
    """A model of eight classes, of which the last has the center of the third."""
    torch.manual_seed(seed)
    shape = (len(NAMES), sub_centers, dim) if sub_centers > 1 else (len(NAMES), dim)
    centers = 3.0 * torch.randn(shape)
    centers[-1] = centers[2]
    model = picture_model(centers, NAMES, Preprocessing(kind="photo", size=16))
    return TrainedModel(**{**vars(model), "is_cosine": is_cosine})


def exported(folder: Path, model: TrainedModel | None = None, *, version: int | None = None) -> Path:
    """The folder of an exported model; of the small one a copy of what this process exported once."""
    require_onnx()
    if model is not None:
        export_model(model, folder, version=version)
        return folder
    version = next_version(folder) if version is None else version
    with replacing_folder(folder) as staging:
        shutil.copytree(_small_export().name, staging, dirs_exist_ok=True)
        config = unseal_folder(staging)
        (staging / CONFIG).unlink()
        seal_folder(staging, {**config, "version": version, "created": time.time()})
    return folder


@functools.cache
def _small_export() -> tempfile.TemporaryDirectory[str]:
    found = tempfile.TemporaryDirectory(prefix="geartrain-small-model-")
    export_model(small_model(), Path(found.name))
    return found


def picture(seed: int, suffix: str = "PNG") -> bytes:
    """An image file of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 24), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, suffix)
    return file.getvalue()


def in_base64(data: bytes) -> str:
    """As JSON has it."""
    return base64.b64encode(data).decode()
