"""``geartrain export RUN --to DIR``: a trained model as a folder that is served."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.errors import ConfigError
from geartrain.serving.index.registry import write_index
from geartrain.workers.job.folder import has_run, read_run
from geartrain.workers.models.export import export_model
from geartrain.workers.models.saved_model import CONFIG
from geartrain.workers.models.trained_model import TrainedModel, load_model

VERSIONS_KEPT = 10


def export_run(run: Path, to: Path, *, backbone: str | None, keep: int | None, as_json: bool) -> None:
    """Write the model of a run, or of its folder, to ``to``; of a folder of versions as the next one there.

    Raises ConfigError, InvalidArgument, OSError; then what was there is there still.
    """
    model = load_model(run, backbone=backbone)
    version = _version(model, run)
    versions = _versions(to)
    has_versions = keep is not None or bool(versions)
    if has_versions and (to / CONFIG).exists():
        raise ConfigError(f"{to} holds one model, and --keep {keep} is for a folder of versions; give a new name")
    folder = to / f"{1 + max(versions, default=0) if version is None else version:06}" if has_versions else to

    def index(staging: Path, arrays: Mapping[str, npt.NDArray[np.float32]]) -> dict[str, Any]:
        return {
            "index": write_index(staging, arrays["centers"], arrays.get("biases"), is_cosine=model.is_cosine),
        }

    exported = export_model(model, folder, version=version, finish=index)
    if has_versions:
        for old in sorted(_versions(to).items())[: -(keep or VERSIONS_KEPT)]:
            shutil.rmtree(old[1])
    config = exported.config
    facts = {
        "folder": str(folder),
        "version": config["version"],
        "classes": config["num_classes"],
        "dim": config["dim"],
        "largest_distance": exported.parity.largest_distance,
    }
    print(
        json.dumps(facts)
        if as_json
        else f"{folder} holds version {config['version']}: a backbone of {config['dim']} features and "
        f"{config['num_classes']:,} classes; onnxruntime's features are {exported.parity.largest_distance:.1e} of "
        f"their length from PyTorch's ({exported.parity.images} images)"
    )


def _version(model: TrainedModel, run: Path) -> int | None:
    """The step that the model is of; None: nobody knows."""
    if "best" in model.training:
        return int(model.training["best"]["step"])
    return read_run(run).stage_end if has_run(run) else None


def _versions(folder: Path) -> dict[int, Path]:
    inside = folder.iterdir() if folder.is_dir() else ()
    return {int(path.name): path for path in inside if path.name.isdecimal() and path.is_dir()}
