"""``geartrain export RUN --to DIR``: a trained model as a folder that is served."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.text import counted
from geartrain.serving.index.registry import write_index
from geartrain.workers.ctr.export import export_clicks
from geartrain.workers.ctr.predict import job_of_rows
from geartrain.workers.job.folder import has_run, read_run
from geartrain.workers.job.state import newest_snapshot
from geartrain.workers.models.export import export_model
from geartrain.workers.models.saved_model import CONFIG
from geartrain.workers.models.trained_model import TrainedModel, load_model
from geartrain.workers.tdm.export import export_tree

VERSIONS_KEPT = 10


def export_run(
    run: Path, to: Path, *, backbone: str | None, keep: int | None, rows: str | None, cache: Path, as_json: bool
) -> None:
    """Write the model of a run, or of its folder, to ``to``; of a folder of versions as the next one there.

    Of a model of clicks ``rows`` is an export of its tables, whose rows are followed. Raises ConfigError,
    InvalidArgument, OSError; then what was there is there still.
    """
    job = job_of_rows(run)
    if job == "ctr":
        facts, words = _export_clicks(run, to, keep, rows, cache)
    elif job == "tdm":
        facts, words = _export_tree(run, to, keep, rows)
    elif rows is not None:
        raise ConfigError(f"--rows {rows} is for a model of clicks, and {run} has no tables; leave it out")
    else:
        facts, words = _export_pictures(run, to, keep, backbone)
    print(json.dumps(facts) if as_json else words)


def _export_clicks(run: Path, to: Path, keep: int | None, rows: str | None, cache: Path) -> tuple[dict[str, Any], str]:
    with _version_folder(to, newest_snapshot(read_run(run).snapshots).manifest.step, keep) as folder:
        config = export_clicks(run, folder, cache=cache, say=lambda line: print(line, file=sys.stderr), follow=rows)
    version, error = config["version"], config["parity"]["max_error"]
    num_rows = sum(table["rows"] for table in config["tables"]["mapped"])
    facts = {"folder": str(folder), "version": version, "rows": num_rows, "max_error": error}
    where = f"{num_rows:,} rows" if rows is None else f"the rows of {rows}"
    return facts, (
        f"{folder} holds version {version}: the network {config['model']} of {counted(len(config['fields']), 'field')} "
        f"and {where}; onnxruntime's log-odds are {error:.1e} from PyTorch's"
    )


def _export_tree(run: Path, to: Path, keep: int | None, rows: str | None) -> tuple[dict[str, Any], str]:
    with _version_folder(to, newest_snapshot(read_run(run).snapshots).manifest.step, keep) as folder:
        config = export_tree(run, folder, follow=rows)
    version, items, error = config["version"], config["num_items"], config["parity"]["max_error"]
    facts = {"folder": str(folder), "version": version, "items": items, "max_error": error}
    return facts, (
        f"{folder} holds version {version}: a tree of {items:,} items; onnxruntime's log-odds are {error:.1e} from "
        "PyTorch's"
    )


def _export_pictures(run: Path, to: Path, keep: int | None, backbone: str | None) -> tuple[dict[str, Any], str]:
    model = load_model(run, backbone=backbone)

    def index(staging: Path, arrays: Mapping[str, npt.NDArray[np.float32]]) -> dict[str, Any]:
        return {
            "index": write_index(staging, arrays["centers"], arrays.get("biases"), is_cosine=model.is_cosine),
        }

    version = _version(model, run)
    with _version_folder(to, version, keep) as folder:
        exported = export_model(model, folder, version=version, finish=index)
    config = exported.config
    facts = {
        "folder": str(folder),
        "version": config["version"],
        "classes": config["num_classes"],
        "dim": config["dim"],
        "largest_distance": exported.parity.largest_distance,
    }
    return facts, (
        f"{folder} holds version {config['version']}: a backbone of {config['dim']} features and "
        f"{config['num_classes']:,} classes; onnxruntime's features are {exported.parity.largest_distance:.1e} of "
        f"their length from PyTorch's ({exported.parity.images} images)"
    )


@contextmanager
def _version_folder(to: Path, version: int | None, keep: int | None) -> Iterator[Path]:
    """The folder to write a version to: ``to``, or one in it where it has versions; older ones go at the end."""
    versions = _versions(to)
    has_versions = keep is not None or bool(versions)
    if has_versions and (to / CONFIG).exists():
        raise ConfigError(f"{to} holds one model, and --keep {keep} is for a folder of versions; give a new name")
    yield to / f"{1 + max(versions, default=0) if version is None else version:06}" if has_versions else to
    if has_versions:
        for old in sorted(_versions(to).items())[: -(keep or VERSIONS_KEPT)]:
            shutil.rmtree(old[1])


def _version(model: TrainedModel, run: Path) -> int | None:
    """The step that the model is of; None: nobody knows."""
    if "best" in model.training:
        return int(model.training["best"]["step"])
    return read_run(run).stage_end if has_run(run) else None


def _versions(folder: Path) -> dict[int, Path]:
    inside = folder.iterdir() if folder.is_dir() else ()
    return {int(path.name): path for path in inside if path.name.isdecimal() and path.is_dir()}
