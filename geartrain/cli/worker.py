"""``geartrain worker``: processes that train."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from geartrain.ams.observe import failpoints
from geartrain.ams.values.errors import ConfigError
from geartrain.cli import configuration
from geartrain.cli.options import Json, Mode

if TYPE_CHECKING:
    from rich.console import Console

    from geartrain.workers.job.training_run import JobOptions, JobResult
    from geartrain.workers.recipes.recipe import Recipe

INTERRUPTED = 130

# Read by OpenMP when torch is loaded. Threads that spin while they wait slow a training on a shared machine down by
# three to six times (measured: 357 against 2,160 images/s beside two other jobs).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

app = typer.Typer(no_args_is_help=True, help="Train a classifier whose class centers are rows of the model server.")


def _out(default: str) -> Any:
    help_text = "Run folder to write; with --resume it is the one gone on with."
    return typer.Option("--out", help=help_text, show_default=default)


# What is not given is decided by the recipe, which loads torch: so the help's defaults are written here, and a test
# compares them.
FEW_CLASSES = {"sample_rate": 1.0, "batch_size": 64, "steps": 300, "warmup_steps": 20}
"""What differs from the recipe for a person's images: all classes are active, and small batches see them often."""


def _steps(default: int) -> Any:
    text = "Updates to train for; of a finished run that is resumed, further ones."
    return typer.Option("--steps", help=text, show_default=f"{default}")


def _batch_size(default: int) -> Any:
    return typer.Option("--batch-size", help="Images of a step, over all ranks.", show_default=f"{default}")


def _sample_rate(default: float) -> Any:
    text = "Part of the classes active in a step; 1 is the full softmax."
    return typer.Option("--sample-rate", "--active", help=text, show_default=f"{default}")


Select = Annotated[
    str | None,
    typer.Option(
        "--select",
        help="Active classes: knn (the labels and their neighbours), partial (the labels and random ones) or full.",
        show_default="partial",
    ),
]
Neighbours = Annotated[
    int | None, typer.Option("--k", min=1, help="With --select knn: neighbours kept of each class.", show_default="32")
]
Rebuild = Annotated[
    str | None,
    typer.Option(
        "--rebuild",
        help="With --select knn: when to look for the neighbours anew: epoch, background (the same, beside the "
        "training) or a number of steps.",
        show_default="epoch",
    ),
]
Rows = Annotated[
    str | None,
    typer.Option(
        "--rows",
        help="Where the work on the class centers is done: pull (here, they travel) or hosted (on the shards, beside "
        "them; features travel). A resumed run may change it.",
        show_default="pull",
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        help="Run folder to go on with: to its end or, if it had ended, for as many steps again (or --steps more).",
        show_default="a new run",
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Start over in --out; the run there is put aside as OUT.previous.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Decides everything random.", show_default="0")]
Lr = Annotated[float | None, typer.Option("--lr", help="Peak learning rate of the backbone.", show_default="0.2")]
Scheduler = Annotated[
    str | None, typer.Option("--scheduler", help="host:port of the scheduler.", show_default="rows in this process")
]
Graph = Annotated[
    str | None,
    typer.Option(
        "--graph",
        help="With --select knn: host:port of the cluster's graph service.",
        show_default="built in this process",
    ),
]
Increments = Annotated[
    int, typer.Option("--increments", min=0, help="Snapshots of only the rows written since, between two of all rows.")
]
AllowFallback = Annotated[
    bool, typer.Option("--allow-fallback", help="With --resume: if the newest snapshot is damaged, take one before it.")
]
RowMomentum = Annotated[
    float | None, typer.Option("--row-momentum", help="Momentum of the class centers.", show_default="0.0")
]
RowMomentumUntouched = Annotated[
    str | None,
    typer.Option(
        "--row-momentum-untouched",
        help="With --row-momentum: what a step does to class centers that are not active in it: freeze (nothing), or "
        "elapsed (they move on, as under dense momentum).",
        show_default="freeze",
    ),
]
Snapshots = Annotated[
    str | None,
    typer.Option(
        "--snapshots", help="Folder or URL for snapshots; the shards must see it, too.", show_default="OUT/snapshots"
    ),
]
SnapshotSteps = Annotated[
    int | None, typer.Option("--snapshot-steps", min=1, help="Steps between snapshots.", show_default="200")
]
SnapshotMinutes = Annotated[
    float | None,
    typer.Option("--snapshot-minutes", help="Take one at least so often, too.", show_default="by steps alone"),
]
Keep = Annotated[int, typer.Option("--keep", min=1, help="Snapshots that stay.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1 ...")]
Cache = Annotated[
    Path, typer.Option("--cache", envvar="GEARTRAIN_CACHE", help="Folder for downloaded fonts and drawn characters.")
]


@app.command()
def glyphs(
    out: Annotated[Path | None, _out("runs/glyphs")] = None,
    resume: Resume = None,
    overwrite: Overwrite = False,
    steps: Annotated[int | None, _steps(600)] = None,
    batch_size: Annotated[int | None, _batch_size(256)] = None,
    seed: Seed = None,
    lr: Lr = None,
    sample_rate: Annotated[float | None, _sample_rate(0.1)] = None,
    select: Select = None,
    neighbours: Neighbours = None,
    rebuild: Rebuild = None,
    rows: Rows = None,
    classes: Annotated[
        int | None,
        typer.Option("--classes", help="Only so many characters, evenly spread (a small run).", show_default="all"),
    ] = None,
    row_momentum: RowMomentum = None,
    row_momentum_untouched: RowMomentumUntouched = None,
    snapshots: Snapshots = None,
    snapshot_steps: SnapshotSteps = None,
    snapshot_minutes: SnapshotMinutes = None,
    keep: Keep = 2,
    increments: Increments = 0,
    allow_fallback: AllowFallback = False,
    scheduler: Scheduler = None,
    graph: Graph = None,
    device: Device = "auto",
    mode: Mode = None,
    cache: Cache = Path(".cache"),
    as_json: Json = False,
) -> None:
    """Learn to read 40,992 CJK characters and Hangul syllables from fonts, and test on fonts never seen.

    Without --scheduler the rows live in this process. Under torchrun the ranks train in step (--scheduler is needed).
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
        "snapshot_steps": snapshot_steps,
    }
    _refuse_with_resume(resume, **own, out=out, snapshots=snapshots, classes=classes)
    console = _console(as_json)
    kept = _Kept(snapshots, snapshot_minutes, keep, increments, allow_fallback)
    options = _options(
        out or Path("runs/glyphs"), resume, overwrite, steps, kept, (scheduler, graph), rows, device, mode
    )
    recipe = _recipe(options.recipe, steps=steps, **own)
    from geartrain.workers.recipes.jobs import train_glyphs

    _end(train_glyphs(replace(options, recipe=recipe), cache=cache, num_classes=classes, console=console), as_json)


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
    out: Annotated[Path | None, _out("runs/classify")] = None,
    resume: Resume = None,
    overwrite: Overwrite = False,
    steps: Annotated[int | None, _steps(300)] = None,
    batch_size: Annotated[int | None, _batch_size(64)] = None,
    seed: Seed = None,
    lr: Lr = None,
    sample_rate: Annotated[float | None, _sample_rate(1.0)] = None,
    select: Select = None,
    neighbours: Neighbours = None,
    rebuild: Rebuild = None,
    rows: Rows = None,
    held_out: Annotated[float, typer.Option("--held-out", help="Part of each class kept for the test.")] = 0.2,
    look: Annotated[
        str, typer.Option("--look", help="photo: the whole picture; ink: characters and signs, cut to their ink.")
    ] = "photo",
    image_size: Annotated[int, typer.Option("--image-size", help="Side in pixels, a multiple of 32.")] = 64,
    grey: Annotated[bool, typer.Option("--grey", help="Ignore colours.")] = False,
    row_momentum: RowMomentum = None,
    row_momentum_untouched: RowMomentumUntouched = None,
    snapshots: Snapshots = None,
    snapshot_steps: SnapshotSteps = None,
    snapshot_minutes: SnapshotMinutes = None,
    keep: Keep = 2,
    increments: Increments = 0,
    allow_fallback: AllowFallback = False,
    scheduler: Scheduler = None,
    graph: Graph = None,
    device: Device = "auto",
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
        "snapshot_steps": snapshot_steps,
    }
    _refuse_with_resume(resume, **own, out=out, snapshots=snapshots)
    if look not in ("photo", "ink"):
        raise ConfigError(f"--look is {look!r}; it must be 'photo' or 'ink'")
    console = _console(as_json)
    kept = _Kept(snapshots, snapshot_minutes, keep, increments, allow_fallback)
    options = _options(
        out or Path("runs/classify"), resume, overwrite, steps, kept, (scheduler, graph), rows, device, mode
    )
    from geartrain.workers.data.bitmaps import Preprocessing
    from geartrain.workers.recipes.jobs import train_folder

    few: dict[str, Any] = FEW_CLASSES
    recipe = _recipe(replace(options.recipe, **few), steps=steps, **own)
    preprocessing = Preprocessing(
        kind="ink" if look == "ink" else "photo", size=image_size, channels=1 if grey or look == "ink" else 3
    )
    options = replace(options, recipe=recipe, preprocessing=preprocessing)
    _end(train_folder(options, folder=data, held_out=held_out, console=console), as_json)


def _refuse_with_resume(resume: Path | None, **given: object) -> None:
    """A resumed run goes on with its own settings."""
    flags = {"neighbours": "--k"}
    names = [flags.get(name, f"--{name.replace('_', '-')}") for name, value in given.items() if value is not None]
    if resume is not None and names:
        raise ConfigError(
            f"{', '.join(names)} cannot change for the run that --resume {resume} goes on with; leave out"
        )


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
    resume: Path | None,
    overwrite: bool,
    steps: int | None,
    kept: _Kept,
    roles: tuple[str | None, str | None],
    rows: str | None,
    device: str,
    mode: str | None,
) -> JobOptions:
    scheduler, graph = roles
    given = configuration.flags(configuration.WHOLE, mode=mode) + configuration.flags("client", graph=graph)
    config = configuration.load(None, given)
    failpoints.arm_from_environment(config.mode)
    if graph is not None and scheduler is None:
        raise ConfigError(f"--graph is {graph}, but the rows are in this process; give --scheduler, or no --graph")
    if kept.allow_fallback and resume is None:
        raise ConfigError("--allow-fallback chooses among the snapshots of a run; give it with --resume RUN")
    if resume is not None and overwrite:
        raise ConfigError(f"--overwrite would replace the run that --resume {resume} goes on with; give one of the two")
    from geartrain.workers.data.bitmaps import Preprocessing
    from geartrain.workers.job.training_run import JobOptions
    from geartrain.workers.recipes.recipe import Recipe

    return JobOptions(
        out=resume or out,
        recipe=Recipe(),
        preprocessing=Preprocessing(),
        resume=resume is not None,
        resume_steps=steps,
        overwrite=overwrite,
        allow_fallback=kept.allow_fallback,
        snapshots=kept.snapshots,
        snapshot_minutes=kept.minutes,
        keep_snapshots=kept.keep,
        increments=kept.increments,
        scheduler=scheduler,
        rows=rows,
        graph=None if scheduler is None else config.client.graph,
        device=device,
    )


def _recipe(recipe: Recipe, *, snapshot_steps: int | None, **given: Any) -> Recipe:
    given["save_every"] = snapshot_steps
    return replace(recipe, **{name: value for name, value in given.items() if value is not None})


def _console(as_json: bool) -> Console:
    from rich.console import Console

    return Console(stderr=as_json)


def _end(result: JobResult, as_json: bool) -> None:
    if as_json and result.report is not None:
        print(json.dumps(result.report))
    if not result.finished:
        raise typer.Exit(INTERRUPTED)
