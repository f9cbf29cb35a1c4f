"""``geartrain worker``: processes that train."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from geartrain.ams.observe import failpoints
from geartrain.ams.values.errors import ConfigError
from geartrain.cli.shared import configuration
from geartrain.cli.shared.options import Json, Mode
from geartrain.cli.training import worker_options as option
from geartrain.cli.training.worker_ctr import ctr
from geartrain.cli.training.worker_ends import console_of, end, loggers_of, refuse_contradictions, refuse_with_resume
from geartrain.cli.training.worker_tdm import tdm

if TYPE_CHECKING:
    from geartrain.workers.job.options import JobOptions
    from geartrain.workers.recipes.recipe import Recipe

# Read by OpenMP when torch is loaded. Threads that spin while they wait slow a training on a shared machine down by
# three to six times (measured: 357 against 2,160 images/s beside two other jobs).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

app = typer.Typer(
    no_args_is_help=True, help="Train a model whose rows are on the model server: class centers or embeddings."
)


FEW_CLASSES = {"sample_rate": 1.0, "batch_size": 64, "steps": 300, "warmup_steps": 20}
"""What differs from the recipe for a person's images: all classes are active, and small batches see them often."""

_LOOKS = {"look": "kind", "image_size": "size", "fit": "fit", "grey": "channels"}
"""Flags about pictures, and the field of the preprocessing that each sets."""


@app.command()
def glyphs(
    out: Annotated[Path | None, option.out("runs/glyphs")] = None,
    resume: option.Resume = None,
    continues: option.Continue = False,
    overwrite: option.Overwrite = False,
    steps: Annotated[int | None, option.steps(600)] = None,
    batch_size: Annotated[int | None, option.batch_size(256)] = None,
    seed: option.Seed = None,
    lr: option.Lr = None,
    sample_rate: Annotated[float | None, option.sample_rate(0.1)] = None,
    select: option.Select = None,
    neighbours: option.Neighbours = None,
    rebuild: option.Rebuild = None,
    rows: option.Rows = None,
    classes: Annotated[
        int | None,
        typer.Option("--classes", help="Only so many characters, evenly spread (a small run).", show_default="all"),
    ] = None,
    row_momentum: option.RowMomentum = None,
    row_momentum_untouched: option.RowMomentumUntouched = None,
    sparsity: option.Sparsity = None,
    snapshots: option.Snapshots = None,
    snapshot_steps: option.SnapshotSteps = None,
    snapshot_minutes: option.SnapshotMinutes = None,
    keep: option.Keep = 2,
    increments: option.Increments = 0,
    allow_fallback: option.AllowFallback = False,
    scheduler: option.Scheduler = None,
    graph: option.Graph = None,
    logger: option.Logger = None,
    device: option.Device = "auto",
    mode: Mode = None,
    cache: option.Cache = Path(".cache"),
    as_json: Json = False,
) -> None:
    """Learn to read 40,992 CJK characters and Hangul syllables from fonts, and test on fonts never seen.

    Without --scheduler the rows live in this process. Under 'torchrun --rdzv-backend loopback' the ranks train in step
    (with --scheduler, or --rows ranks).
    """
    own: dict[str, Any] = {
        "batch_size": batch_size,
        "seed": seed,
        "lr": lr,
        "sample_rate": sample_rate,
        "select": select,
        "neighbours": neighbours,
        "rebuild": rebuild,
        "row_momentum": row_momentum,
        "row_momentum_untouched": row_momentum_untouched,
        "sparsity": sparsity,
        "snapshot_steps": snapshot_steps,
    }
    refuse_with_resume(resume, **own, out=out, snapshots=snapshots, classes=classes)
    console = console_of(as_json)
    kept = _Kept(snapshots, snapshot_minutes, keep, increments, allow_fallback)
    options = _options(
        out or Path("runs/glyphs"),
        (resume, continues),
        overwrite,
        steps,
        kept,
        (scheduler, graph),
        rows,
        device,
        mode,
        logger,
    )
    recipe, stated = _recipe(options.recipe, steps=steps, **own)
    from geartrain.workers.recipes.jobs import train_glyphs

    end(
        train_glyphs(replace(options, recipe=recipe, stated=stated), cache=cache, num_classes=classes, console=console),
        as_json,
    )


@app.command()
def classify(
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="Folder with one sub-folder of images for each class, WebDataset shards (*.tar), or train.rec.",
            show_default="that of the resumed run",
        ),
    ] = None,
    out: Annotated[Path | None, option.out("runs/classify")] = None,
    resume: option.Resume = None,
    continues: option.Continue = False,
    overwrite: option.Overwrite = False,
    steps: Annotated[int | None, option.steps(300)] = None,
    batch_size: Annotated[int | None, option.batch_size(64)] = None,
    seed: option.Seed = None,
    lr: option.SweptLr = None,
    sample_rate: Annotated[float | None, option.sample_rate(1.0)] = None,
    select: option.Select = None,
    neighbours: option.Neighbours = None,
    rebuild: option.Rebuild = None,
    rows: option.Rows = None,
    backbone: option.Backbone = None,
    dim: option.Dim = None,
    optimizer: option.Optimizer = None,
    imprint: option.Imprint = None,
    dtype: option.DType = "auto",
    margin: option.Margin = None,
    sub_centers: option.SubCenters = None,
    augment: option.Augment = None,
    held_out: option.HeldOut = None,
    look: option.Look = None,
    image_size: option.ImageSize = None,
    fit: option.Fit = None,
    grey: option.Grey = None,
    skip_unreadable: option.SkipUnreadable = None,
    image_memory: option.ImageMemory = None,
    row_momentum: option.RowMomentum = None,
    row_momentum_untouched: option.RowMomentumUntouched = None,
    sparsity: option.Sparsity = None,
    snapshots: option.Snapshots = None,
    snapshot_steps: option.SnapshotSteps = None,
    snapshot_minutes: option.SnapshotMinutes = None,
    keep: option.Keep = 2,
    increments: option.Increments = 0,
    allow_fallback: option.AllowFallback = False,
    scheduler: option.Scheduler = None,
    graph: option.Graph = None,
    logger: option.Logger = None,
    device: option.Device = "auto",
    mode: Mode = None,
    as_json: Json = False,
) -> None:
    """Train on your own images, pictures of any size and colour: one sub-folder a class, WebDataset shards (a .tar file
    or a folder of them), or the .rec and .idx files of InsightFace.
    """
    own: dict[str, Any] = {
        "batch_size": batch_size,
        "seed": seed,
        "lr": lr,
        "sample_rate": sample_rate,
        "select": select,
        "neighbours": neighbours,
        "rebuild": rebuild,
        "row_momentum": row_momentum,
        "row_momentum_untouched": row_momentum_untouched,
        "sparsity": sparsity,
        "snapshot_steps": snapshot_steps,
        "dim": dim,
        "optimizer": optimizer,
        "imprint": imprint,
        "margin": margin,
        "sub_centers": sub_centers,
        "augment": augment,
    }
    of_images: dict[str, Any] = {
        "held_out": held_out,
        "look": look,
        "image_size": image_size,
        "fit": fit,
        "grey": grey,
        "skip_unreadable": skip_unreadable,
        "image_memory": image_memory,
    }
    refuse_with_resume(resume, **own, **of_images, out=out, snapshots=snapshots)
    look = look or "photo"
    if look not in ("photo", "ink"):
        raise ConfigError(f"--look is {look!r}; it must be 'photo' or 'ink'")
    console = console_of(as_json)
    kept = _Kept(snapshots, snapshot_minutes, keep, increments, allow_fallback)
    options = _options(
        out or Path("runs/classify"),
        (resume, continues),
        overwrite,
        steps,
        kept,
        (scheduler, graph),
        rows,
        device,
        mode,
        logger,
    )
    from geartrain.workers.data.bitmaps import Preprocessing
    from geartrain.workers.data.folder import MEMORY_BYTES
    from geartrain.workers.recipes.jobs import train_folder
    from geartrain.workers.recipes.optimizers import JOB_OPTIMIZERS

    few: dict[str, Any] = FEW_CLASSES
    if imprint is None:
        own["imprint"] = backbone is None or not backbone.startswith(("iresnet", "timm:"))
    if lr is None and optimizer in JOB_OPTIMIZERS and JOB_OPTIMIZERS[optimizer].usual_rate is not None:
        own["lr"] = JOB_OPTIMIZERS[optimizer].usual_rate
    recipe, stated = _recipe(replace(options.recipe, **few), steps=steps, backbone=backbone, **own)
    preprocessing = Preprocessing(
        kind="ink" if look == "ink" else "photo",
        size=64 if image_size is None else image_size,
        channels=1 if grey or look == "ink" else 3,
        fit="stretch" if fit is None else fit,  # type: ignore[arg-type]
    )
    options = replace(
        options,
        recipe=recipe,
        stated=stated,
        preprocessing=preprocessing,
        stated_look=tuple(_LOOKS[name] for name, value in of_images.items() if name in _LOOKS and value is not None),
        sweep=lr is None and resume is None,
        dtype=dtype,
        backbone=backbone,
    )
    result = train_folder(
        options,
        folder=data,
        held_out=0.2 if held_out is None else held_out,
        console=console,
        skip_unreadable=bool(skip_unreadable),
        image_memory_bytes=MEMORY_BYTES if image_memory is None else image_memory << 20,
    )
    end(result, as_json)


@dataclass(frozen=True)
class _Kept:
    """The flags about snapshots that a resumed run may change."""

    snapshots: str | None
    minutes: float | None
    keep: int
    increments: int
    allow_fallback: bool


def _options(
    out: Path,
    goes_on: tuple[Path | None, bool],
    overwrite: bool,
    steps: int | None,
    kept: _Kept,
    roles: tuple[str | None, str | None],
    rows: str | None,
    device: str,
    mode: str | None,
    logger: list[str] | None,
) -> JobOptions:
    (scheduler, graph), (resume, continues) = roles, goes_on
    given = configuration.flags(configuration.WHOLE, mode=mode) + configuration.flags("client", graph=graph)
    config = configuration.load(None, given)
    failpoints.arm_from_environment(config.mode)
    if graph is not None and scheduler is None and resume is None and not continues:
        raise ConfigError(f"--graph is {graph}, but the rows are in this process; give --scheduler, or no --graph")
    refuse_contradictions(resume, continues=continues, overwrite=overwrite, allow_fallback=kept.allow_fallback)
    from geartrain.workers.data.bitmaps import Preprocessing
    from geartrain.workers.job.options import JobOptions
    from geartrain.workers.recipes.recipe import Recipe

    return JobOptions(
        out=resume or out,
        recipe=Recipe(),
        preprocessing=Preprocessing(),
        resume=resume is not None,
        continues=continues,
        resume_steps=steps,
        overwrite=overwrite,
        allow_fallback=kept.allow_fallback,
        snapshots=kept.snapshots,
        snapshot_minutes=kept.minutes,
        keep_snapshots=kept.keep,
        increments=kept.increments,
        scheduler=scheduler,
        rows=rows,
        graph=graph if scheduler is None else config.client.graph,
        device=device,
        loggers=loggers_of(logger),
    )


def _recipe(
    recipe: Recipe, *, snapshot_steps: int | None, augment: str | None = None, **given: Any
) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe as it was given, and the names of its fields that were."""
    given["row_lr"] = given["lr"]
    given["save_every"] = snapshot_steps
    given["augmentation"] = None if augment is None else recipe.augmentation.changed(augment)
    stated = {name: value for name, value in given.items() if value is not None}
    return replace(recipe, **stated), tuple(stated)


app.command()(ctr)
app.command()(tdm)
