"""Model folders: one model, or a folder of its versions; found, checked and loaded without torch."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geartrain.ams.values.errors import ConfigError, ModelDamaged
from geartrain.serving.models.registry import load_kind
from geartrain.workers.atomic import complete_folder
from geartrain.workers.models.saved_model import CONFIG, numbered_versions, read_config, unseal_folder

if TYPE_CHECKING:
    from geartrain.serving.answers import Servable

logger = logging.getLogger(__name__)

_READINGS = 3
"""Attempts to read a folder that is replaced meanwhile."""


def version_folders(folder: Path) -> list[Path]:
    """Return the model folders in ``folder``, newest version first: itself, or its folders named by numbers.

    Raises ConfigError if there is none.
    """
    folder = complete_folder(folder)
    if (folder / CONFIG).exists():
        return [folder]
    if found := numbered_versions(folder):
        return found
    if (folder / "run.json").exists():
        raise ConfigError(
            f"{folder} is the folder of a run; write a model to serve with geartrain export {folder} --to DIR"
        )
    if (folder / "model.json").exists():
        raise ConfigError(
            f"{folder} was saved by geartrain.save; write a model to serve in Python: "
            "geartrain.load_model(path, backbone=MyBackbone()).export_onnx(DIR, example)"
        )
    inside = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    if inside:
        raise ConfigError(f"{folder} holds no model, but models: serve {' '.join(map(str, inside[:3]))}")
    raise ConfigError(f"{folder} holds no model; write one with: geartrain export RUN --to {folder}")


def versions_in(folder: Path) -> dict[int, Path]:
    """Return the folder of each version in ``folder`` by the number in config.json, whatever the folder's name.

    Raises ConfigError if there is none.
    """
    found: dict[int, Path] = {}
    for path in version_folders(folder):
        with suppress(ConfigError, ModelDamaged):
            config = read_config(path)
            kind_of(path, config)
            found.setdefault(int(config["version"]), path)
    return found


def load_newest(folder: Path) -> tuple[Path, Servable]:
    """Return the newest undamaged version in ``folder``, with its own folder. A damaged one is skipped if there is an
    older one.

    Raises ConfigError (no model), ModelDamaged (the newest, if all are damaged).
    """
    damage: ModelDamaged | None = None
    for candidate in version_folders(folder):
        try:
            return candidate, load_folder(candidate)
        except ModelDamaged as exc:
            logger.warning("skipping a version: %s", exc)
            damage = damage or exc
    assert damage is not None
    raise damage


def load_folder(folder: Path) -> Servable:
    """Load the model of one folder, after every file's checksum was verified.

    Raises ConfigError (no model, or of a kind that this version cannot serve), ModelDamaged naming the file,
    InvalidArgument (a network that onnxruntime cannot run).
    """
    for reading in range(_READINGS):
        there = complete_folder(folder)
        config: dict[str, Any] = {}
        try:
            config = read_config(there)
            servable = load_kind(kind_of(there, config), there, unseal_folder(there))
        except (ConfigError, ModelDamaged):
            if reading == _READINGS - 1 or not _was_replaced(folder, config):
                raise
            continue
        if not _was_replaced(folder, config):  # otherwise some of its files may be of the other model
            return servable
        servable.close()
    raise ModelDamaged(f"{folder} is replaced again and again while it is read; ask for it when it stays")


def kind_of(folder: Path, config: dict[str, Any]) -> str:
    """Return the kind of model in config.json. Raises ConfigError for the model of a training."""
    if config.get("kind") is None:
        raise ConfigError(
            f"{folder} is the model of a training; write one to serve with geartrain export {folder} --to DIR"
        )
    return str(config["kind"])


def _was_replaced(folder: Path, config: dict[str, Any]) -> bool:
    """Return whether the model in ``folder`` was replaced since reading began."""
    try:
        return read_config(complete_folder(folder)) != config
    except (ConfigError, ModelDamaged):
        return False
