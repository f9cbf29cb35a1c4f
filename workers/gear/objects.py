"""Objects that a slow gear loads by name: functions of the user's modules, sources of samples, optimizers."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from geartrain.ams.storage.features.factory import open_store
from geartrain.ams.values.errors import ConfigError, InvalidArgument
from geartrain.ams.values.optimizers.registry import OPTIMIZERS, RowOptimizerSpec, optimizer_of
from geartrain.ams.values.specs import Ids
from geartrain.bridge.gear.sample_source import Decode, DenseSamples
from geartrain.workers.data.bitmaps import decode_picture

SAMPLES_NAMESPACE = "samples"
"""Namespace of samples in a store: write them with ``open_store(URL, namespace="samples")``."""
_FOLDER_STORE = "lmdb:"
_STORES = (_FOLDER_STORE, "redis://", "rediss://", "unix://")


def load_object(place: str, what: str) -> Any:
    """Return the object ``"mypkg.image:build"``; modules of the current folder are found, too. Raises ConfigError."""
    module, _, attribute = place.partition(":")
    if not module or not attribute:
        raise ConfigError(f"{what} is {place!r}; it must be 'module:name', as 'mypkg.image:build'")
    if "/" in module or module.startswith(".") or module.endswith(".py"):
        raise ConfigError(
            f"{what} is {place!r}; {module!r} must be the name of a module, not a file: 'image:build' for the function "
            "'build' of image.py in the current folder, or in one on PYTHONPATH"
        )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
        for name in attribute.split("."):
            found = getattr(found, name)
    except ModuleNotFoundError as exc:
        raise ConfigError(f"{what} {place!r} cannot be loaded: {exc}; is its folder on PYTHONPATH?") from exc
    except AttributeError as exc:
        raise ConfigError(
            f"{what} {place!r} cannot be loaded: {exc}; what is behind ':' must be in that module"
        ) from exc
    except Exception as exc:  # the user's module may raise anything
        words = f"{type(exc).__name__}: {exc}"
        raise ConfigError(f"{what} {place!r} cannot be loaded: {words}") from exc
    return found


def load_function(place: str, what: str) -> Callable[..., Any]:
    """Return the function that ``place`` names. Raises ConfigError."""
    found = load_object(place, what)
    if not callable(found):
        raise ConfigError(f"{what} {place!r} is {type(found).__name__}; it must be a function")
    function: Callable[..., Any] = found
    return function


def open_samples(place: str, decode: str | None) -> tuple[DenseSamples, Decode | None]:
    """Return the source of samples, and the function that decodes their bytes to a tensor. Raises ConfigError."""
    decoder = None if decode is None else load_function(decode, "decode")
    if place.startswith("folder:"):
        return SampleFolder(place.removeprefix("folder:")), decoder or decode_image
    if place.startswith(_STORES):
        folder = place.removeprefix(_FOLDER_STORE)
        if folder != place and not Path(folder).is_dir():
            raise ConfigError(f"samples are in the store in {folder!r}, which is not there; give a folder that is")
        return open_store(place, namespace=SAMPLES_NAMESPACE), decoder or decode_image
    return load_object(place, "samples"), decoder


class SampleFolder:
    """Files named by id: ``12``, ``12.png``. Implements :class:`geartrain.bridge.gear.sample_source.SampleStore`."""

    def __init__(self, folder: str) -> None:
        """Raise ConfigError unless the folder exists."""
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise ConfigError(f"samples are in the folder {folder!r}, which is not there; give one that is")

    def read(self, ids: Ids) -> list[bytes | None]:
        """Return the bytes of each file; None if it is missing."""
        return [self._read(int(number)) for number in ids]

    def _read(self, number: int) -> bytes | None:
        plain = self._folder / str(number)
        found = plain if plain.is_file() else next(iter(sorted(self._folder.glob(f"{number}.*"))), None)
        return None if found is None else found.read_bytes()


def decode_image(raw: bytes) -> Tensor:
    """Return an image file as float32 [channels, height, width] in [0, 1]. Raises InvalidArgument if it is none."""
    image = decode_picture(BytesIO(raw), "a sample")
    pixels = np.asarray(image if image.mode in ("L", "RGB") else image.convert("RGB"), np.float32) / 255.0
    return torch.from_numpy(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1).copy())


def optimizer_named(text: str) -> RowOptimizerSpec:
    """Return the optimizer of ``"adam:0.001"``: ``Adam(0.001)``. Raises ConfigError."""
    name, _, rate = text.partition(":")
    try:
        return optimizer_of(name, {"lr": float(rate)})
    except (ValueError, InvalidArgument) as exc:
        known = ", ".join(f"{rule}:RATE" for rule in OPTIMIZERS)
        raise ConfigError(f"optimizer is {text!r}; it must be one of {known}, as 'adam:0.001'") from exc
