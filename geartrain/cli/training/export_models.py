"""``geartrain export RUN --to DIR``: a trained model as a folder to serve."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import track as rich_track

from geartrain.ams.values.errors import ConfigError, GeartrainError
from geartrain.ams.values.text import counted, sized
from geartrain.cli.shared.consoles import plain_console
from geartrain.serving.index.choice import require_choice
from geartrain.serving.index.registry import write_index
from geartrain.workers.classify import class_pictures
from geartrain.workers.classify.run_images import images_of
from geartrain.workers.ctr.export import export_clicks
from geartrain.workers.ctr.predict import job_of_rows
from geartrain.workers.ctr.samples import examples
from geartrain.workers.job.folder import has_run, read_run, warn_if_unended
from geartrain.workers.job.state import best_snapshot
from geartrain.workers.models.export import Arrays, RunImages, export_model, next_version
from geartrain.workers.models.onnx_backbone import OnnxBackbone
from geartrain.workers.models.precision import require_precision
from geartrain.workers.models.saved_model import CONFIG, ONNX, numbered_versions, read_training, step_of
from geartrain.workers.models.trained_model import TrainedModel, load_model
from geartrain.workers.models.verify import verify_file
from geartrain.workers.tdm.export import export_tree

VERSIONS_KEPT = 10
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class ModelExport:
    """Settings of a model export."""

    precision: str = "fp32"
    """Precision of the network; :mod:`geartrain.workers.models.precision` lists the choices."""
    recall: float = 1.0
    """Share of queries whose best class the index must find; 1: exact."""
    index: str | None = None
    """Kind of the index; None: of many classes ivf, else hnsw, if one is fast with enough recall; else exact."""
    backbone: str | None = None
    """``package.module:function`` of a user-defined backbone."""
    data: str | None = None
    """Current place of the run's images, if they were moved."""
    cache: Path = Path(".cache")
    """Cache folder of rendered characters."""
    pairs: Path | None = None
    """Pairs of pictures, from which the cosine threshold for "the same" is measured."""
    examples: bool = True
    """Whether to include a few samples of clicks, for trying the model on the page."""
    keep: int | None = None
    """Number of versions that stay; None: one model, or the default number in a folder of versions."""


def export_run(run: Path, to: Path, settings: ModelExport, *, as_json: bool) -> None:
    """Write the model of a run, or of its folder, to ``to``; as the next version if ``to`` is a folder of versions.

    Raises ConfigError, InvalidArgument, OSError; the existing export then stays.
    """
    job = job_of_rows(run)
    if job == "ctr":
        facts, lines = _export_rows(run, to, settings, partial(export_clicks, cache=settings.cache, say=_say))
    elif job == "tdm":
        facts, lines = _export_rows(run, to, settings, export_tree)
    else:
        facts, lines = _export_pictures(run, to, settings, plain_console(stderr=True, quiet=as_json))
    for line in [json.dumps(facts)] if as_json else lines:
        print(line)


def _export_rows(
    run: Path, to: Path, settings: ModelExport, write: Callable[..., dict[str, Any]]
) -> tuple[dict[str, Any], list[str]]:
    """Export a model of embeddings with ``write(run, folder, version=...)``, which returns its config."""
    if settings.pairs is not None:
        raise ConfigError(f"--pairs {settings.pairs} is for models of pictures; {run} has none: leave it out")
    job, step = read_run(run).job, best_snapshot(read_run(run).snapshots).manifest.step
    with _version_folder(to, job, step, settings.keep) as (folder, version):
        config = write(run, folder, version=version, examples=settings.examples)
        shown = examples.read_examples(folder)
    warn_if_unended(run, config["training"]["step"], _say)
    error = config["parity"]["max_error"]
    if "num_items" in config:
        counts, what = {"items": config["num_items"]}, f"a tree of {config['num_items']:,} items"
    else:
        counts = {"rows": sum(table["rows"] for table in config["tables"])}
        fields = counted(len(config["fields"]), "field")
        what = f"the network {config['model']} of {fields} and {counts['rows']:,} rows"
    lines = [
        f"{folder} holds version {version}, of step {config['training']['step']}: {what}; onnxruntime's log-odds are "
        f"{error:.1e} from PyTorch's"
    ]
    if kept := [*examples.fields_shown(shown), *(["titles of items"] if shown.get("titles") else [])]:
        lines.append(
            f"{examples.FILE} has values of {', '.join(kept)}, for the page to try the model; leave them out by "
            "--no-examples"
        )
    return {"folder": str(folder), "version": version, **counts, "max_error": error}, lines


def _export_pictures(run: Path, to: Path, settings: ModelExport, console: Console) -> tuple[dict[str, Any], list[str]]:
    precision = require_precision(settings.precision)
    require_choice(settings.recall, settings.index)  # before anything slow
    if not has_run(run) and has_run(run.parent):
        run = run.parent  # ``run`` was its folder "model"
    model = load_model(run, backbone=settings.backbone)
    if settings.pairs is not None and model.preprocessing is None:
        raise ConfigError(f"--pairs {settings.pairs} is for models of pictures; {run} takes tensors: leave it out")

    def index(staging: Path, arrays: Arrays, features: npt.NDArray[np.float32] | None) -> dict[str, Any]:
        class_pictures.bring(run, staging, len(model.class_names))
        written = write_index(
            staging,
            arrays["centers"],
            arrays.get("biases"),
            is_cosine=model.is_cosine,
            asked_recall=settings.recall,
            kind=settings.index,
            queries=features,
        )
        verified = {} if settings.pairs is None else {"verify": _verified(model, staging, settings.pairs)}
        return {"index": written, **verified, "training": {**model.training, "job": job, "step": step}}

    def track(items: Iterable[Item], what: str, count: int) -> Iterable[Item]:
        return rich_track(items, what, count, console=console, transient=True, disable=not console.is_terminal)

    job, step = _moment(model, run)
    warn_if_unended(run, step, _say)
    with _version_folder(to, job, step, settings.keep) as (folder, version):
        images, why = _images(run, model, settings, console)
        console.print(f"Writing the network of {run} as ONNX")
        exported = export_model(
            model, folder, version=version, precision=precision, images=images, finish=index, track=track
        )
    config = exported.config
    named = ("version", "dim", "precision", "parity", "accuracy", "index")
    facts = {name: config[name] for name in named if name in config}
    return {"folder": str(folder), "classes": config["num_classes"], **facts}, list(_lines(folder, config, why))


def _verified(model: TrainedModel, staging: Path, pairs: Path) -> dict[str, Any]:
    """Return the threshold measured on pairs with the exported network: two pictures above it show the same."""
    exported = TrainedModel(**{**vars(model), "backbone": OnnxBackbone(staging / ONNX)})
    found = verify_file(exported, pairs, mirror=False)  # as a service compares them
    return {"threshold": 1 - found.threshold / 2, "accuracy": found.accuracy, "pairs": found.pairs}


def _images(run: Path, model: TrainedModel, settings: ModelExport, console: Console) -> tuple[RunImages | None, str]:
    """Return the images of the run, or None and the reason."""
    if model.preprocessing is None:
        return None, "the model takes tensors"
    try:
        return images_of(run, console, data=settings.data, cache=settings.cache), ""
    except GeartrainError as exc:
        if settings.data is not None or settings.precision == "int8":
            raise
        return None, str(exc)


def _lines(folder: Path, config: Mapping[str, Any], why: str) -> Iterator[str]:
    parity, accuracy = config["parity"], config.get("accuracy")
    network = folder / ONNX
    yield (
        f"{folder} holds version {config['version']}: {config['num_classes']:,} classes, a network of "
        f"{config['dim']} features in {config['precision']} ({sized(network.stat().st_size)})"
    )
    kinds = ("held-out image",) if accuracy else ("image of random numbers", "images of random numbers")
    images = counted(parity["images"], *kinds)
    same = parity["same_top1"]
    yield (
        f"{images}: features are {parity['largest_distance']:.1e} of their length from PyTorch's at most (a number of "
        f"them {parity['max_error']:.1e}), the best class is the same for {'all' if same == 1 else f'{same:.2%}'}"
    )
    if same < 1 and config["precision"] == "fp32":
        others = round((1 - same) * parity["images"])
        yield f"Note: {counted(others, 'image')} of two classes of nearly the same score may be named otherwise"
    yield "A service takes pictures" if config["preprocessing"] else "A service takes tensors"
    if line := _index_line(config["index"]):
        yield line
    if verify := config.get("verify"):
        yield (
            f"Two pictures show the same from a cosine of {verify['threshold']:.3f} on: right for "
            f"{verify['accuracy']:.2%} of {verify['pairs']:,} pairs"
        )
    if accuracy is None:
        yield f"No held-out images: {why}"
        return
    named = {"pytorch": "PyTorch"}
    shown = (f"{named.get(name, name)} {share:.2%}" for name, share in accuracy.items() if name != "images")
    yield f"Named rightly: {', '.join(shown)}"
    if sure := config.get("sure_from"):
        yield (
            f"Sure from a score of {sure['score']:.3f} on: {sure['precision']:.2%} of those images are named rightly "
            f"there, {sure['share']:.2%} of all"
        )


def _index_line(index: Mapping[str, Any]) -> str:
    """Return the measured recall of an approximate index in words; "" for an exact one."""
    if index["kind"] == "exact":
        missed = "".join(f"; {tried['kind']} found {tried['recall_at_1']:.2%}" for tried in index["passed_over"])
        return "" if index["asked_recall"] == 1 and not missed else f"Index: exact, which always finds the best{missed}"
    found = f"the best class is found for {index['recall_at_1']:.2%} of {index['recall_queries']:,} questions"
    return f"Index: {index['kind']}, {found} (asked: {index['asked_recall']:.2%})"


@contextmanager
def _version_folder(to: Path, job: str | None, step: int | None, keep: int | None) -> Iterator[tuple[Path, int]]:
    """Yield the folder to write a version to, and its number: ``to`` itself, or a folder in it where it has versions.

    Removes older versions at the end. The number is the step, or the newest number plus one where that is higher. A
    newest version of the same job and step is replaced.
    """
    versions = numbered_versions(to)
    has_versions = keep is not None or bool(versions)
    if has_versions and (to / CONFIG).exists():
        raise ConfigError(f"{to} holds one model, and --keep {keep} is for a folder of versions; give a new name")
    folder = versions[0] if versions else to
    last = int(folder.name) if versions else 0 if has_versions else next_version(to) - 1
    there = read_training(folder)
    is_again = job is not None and (there.get("job"), there.get("step")) == (job, step)
    number = last if is_again else max(step or 0, last + 1)
    if has_versions and not is_again:
        number, folder = _claimed(to, number)
    try:
        yield folder, number
    finally:
        if has_versions:
            with suppress(OSError):
                folder.rmdir()  # nothing was written
    if has_versions:
        for path in numbered_versions(to)[keep or VERSIONS_KEPT :]:
            shutil.rmtree(path)


def _claimed(to: Path, number: int) -> tuple[int, Path]:
    """Make the folder of a version; of a later one where another process has made that."""
    while True:
        try:
            (to / f"{number:06}").mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return number, to / f"{number:06}"


def _moment(model: TrainedModel, run: Path) -> tuple[str | None, int | None]:
    """Return the job and step of the model; None where unknown."""
    found = read_run(run) if has_run(run) else None
    job = model.training.get("job") if found is None else found.job
    step = step_of(model.training)
    if step is None and found is not None and found.ended:
        step = found.stage_end
    return job, step


def _say(line: str) -> None:
    print(line, file=sys.stderr)
