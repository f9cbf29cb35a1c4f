"""``geartrain worker ctr``: train a model that predicts clicks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from geartrain.ams.values.errors import ConfigError
from geartrain.cli.shared.options import Json
from geartrain.cli.training import worker_options as option
from geartrain.cli.training.worker_ends import console_of, end, refuse_with_resume


def ctr(
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="movielens (MovieLens-100K, fetched once: 2 MB), or a folder with its files as RecBole has them.",
            show_default="that of the resumed run",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="deepfm or wide_deep.", show_default="deepfm")] = None,
    split: Annotated[
        str | None,
        typer.Option("--split", help="Which fifth is held out: random, or the last by time.", show_default="random"),
    ] = None,
    out: Annotated[Path | None, option.out("runs/ctr")] = None,
    resume: option.Resume = None,
    overwrite: option.Overwrite = False,
    steps: Annotated[int | None, option.steps(960)] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="Samples of a step.", show_default="500")
    ] = None,
    dim: Annotated[int | None, typer.Option("--dim", help="Width of the embeddings.", show_default="16")] = None,
    dropout: Annotated[
        float | None, typer.Option("--dropout", help="Of the network's layers, in [0, 1).", show_default="0.2")
    ] = None,
    lr: Annotated[
        float | None, typer.Option("--lr", help="Peak learning rate of the network, by Adam.", show_default="0.003")
    ] = None,
    row_lr: Annotated[
        float | None, typer.Option("--row-lr", help="Peak learning rate of the rows, by Adam.", show_default="0.003")
    ] = None,
    seed: option.Seed = None,
    snapshot_steps: option.SnapshotSteps = None,
    keep: option.Keep = 2,
    scheduler: option.Scheduler = None,
    logger: option.Logger = None,
    cache: option.Cache = Path(".cache"),
    as_json: Json = False,
) -> None:
    """Train a model that predicts clicks from sparse features, and test it on a fifth that it never saw.

    A rating of 4 or more is a click. Without --scheduler the rows live in this process. The run folder gets snapshots,
    events for TensorBoard, report.json (AUC, log loss, calibration) and calibration.png.
    """
    own: dict[str, Any] = {
        "model": model,
        "split": split,
        "batch_size": batch_size,
        "dim": dim,
        "dropout": dropout,
        "lr": lr,
        "row_lr": row_lr,
        "seed": seed,
        "snapshot_steps": snapshot_steps,
    }
    refuse_with_resume(resume, **own, data=data, out=out)
    if resume is not None and overwrite:
        raise ConfigError(f"--overwrite would replace the run that --resume {resume} goes on with; give one of the two")
    from geartrain.workers.ctr.job import CtrOptions, train_clicks  # loads torch
    from geartrain.workers.ctr.recipe import CtrRecipe

    own["save_every"] = own.pop("snapshot_steps")
    recipe = CtrRecipe(**{name: value for name, value in {**own, "steps": steps}.items() if value is not None})
    loggers = ["tensorboard"] if logger is None else logger
    options = CtrOptions(
        out=resume or out or Path("runs/ctr"),
        recipe=recipe,
        data=data,
        cache=cache,
        resume=resume is not None,
        resume_steps=steps,
        overwrite=overwrite,
        keep_snapshots=keep,
        scheduler=scheduler,
        loggers=() if loggers == ["none"] else tuple(loggers),
    )
    end(train_clicks(options, console_of(as_json)), as_json)
