"""``geartrain worker tdm``: train a tree of items that finds what a user will like."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from geartrain.cli.shared.options import Json
from geartrain.cli.training import worker_options as option
from geartrain.cli.training.worker_ends import console_of, end, loggers_of


def tdm(
    data: Annotated[
        str | None,
        typer.Option(
            "--data",
            help="movielens (MovieLens-100K, fetched by pip once: 2 MB), or a Parquet file, folder or URL with columns "
            "user, item, time and click.",
            show_default="none",
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option("--split", help="Which fifth is held out: random, or the last by time.", show_default="random"),
    ] = None,
    out: Annotated[Path | None, option.out("runs/tdm")] = None,
    overwrite: option.Overwrite = False,
    steps: Annotated[
        int | None, typer.Option("--steps", help="Updates to train for with each tree.", show_default="400")
    ] = None,
    rebuilds: Annotated[
        int | None,
        typer.Option("--rebuilds", help="How often the tree is made anew by what was learned.", show_default="1"),
    ] = None,
    beam: Annotated[
        int | None, typer.Option("--beam", help="Nodes of a level that the search keeps.", show_default="100")
    ] = None,
    negatives: Annotated[
        int | None,
        typer.Option("--negatives", help="Other nodes of each level for each clicked item.", show_default="4"),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="Clicks of a step.", show_default="250")
    ] = None,
    dim: Annotated[int | None, typer.Option("--dim", help="Width of the embeddings.", show_default="24")] = None,
    seed: option.Seed = None,
    scheduler: option.Scheduler = None,
    logger: option.Logger = None,
    cache: option.Cache = Path(".cache"),
    as_json: Json = False,
) -> None:
    """Train a tree of items level by level, and measure how much of what users liked later its search finds.

    It is compared with the scores of all items, and with the most popular. The run folder gets report.json, events for
    TensorBoard, and the model; a run takes no snapshots.
    """
    own: dict[str, Any] = {
        "split": split,
        "steps": steps,
        "rebuilds": rebuilds,
        "beam": beam,
        "negatives": negatives,
        "batch_size": batch_size,
        "dim": dim,
        "seed": seed,
    }
    from geartrain.workers.tdm.job import TdmOptions, train_tree  # loads torch
    from geartrain.workers.tdm.recipe import TdmRecipe

    recipe = TdmRecipe(**{name: value for name, value in own.items() if value is not None})
    options = TdmOptions(
        out=out or Path("runs/tdm"),
        recipe=recipe,
        data=data,
        cache=cache,
        overwrite=overwrite,
        scheduler=scheduler,
        loggers=loggers_of(logger),
    )
    end(train_tree(options, console_of(as_json)), as_json)
