"""``geartrain plan``: will it fit?"""

from __future__ import annotations

import json
from typing import Annotated, Any, cast

import typer

from geartrain.ams.values.optimizers.registry import OPTIMIZERS, optimizer_of
from geartrain.cli.shared.options import Json

_DTYPE = "float32, float16 or bfloat16."
_OPTIMIZERS = ", ".join(OPTIMIZERS)


def plan(
    classes: Annotated[int, typer.Option("--classes", help="Number of classes.")],
    dim: Annotated[int, typer.Option("--dim", help="Width of features and class centers.")],
    sub_centers: Annotated[int, typer.Option("--sub-centers", help="Centers of a class.")] = 1,
    rows: Annotated[str, typer.Option("--rows", help="Where the rows are: pull, hosted or ranks.")] = "pull",
    dtype: Annotated[str, typer.Option("--dtype", help=f"Storage type of the rows: {_DTYPE}")] = "float32",
    slot_dtype: Annotated[
        str | None, typer.Option("--slot-dtype", help=f"Of the momentum: {_DTYPE}", show_default="float32")
    ] = None,
    momentum: Annotated[
        bool | None, typer.Option("--momentum/--sgd", help="Whether rows have momentum.", show_default="AdamW")
    ] = None,
    adam: Annotated[bool, typer.Option("--adam", help="Rows have the two moments of Adam.")] = False,
    optimizer: Annotated[
        str | None,
        typer.Option(
            "--optimizer", help=f"The rows' optimizer, instead of --momentum, --sgd or --adam: {_OPTIMIZERS}."
        ),
    ] = None,
    sample_rate: Annotated[
        float | None,
        typer.Option("--sample-rate", help="Part of the classes active in a step.", show_default="that of ClassHead"),
    ] = None,
    k: Annotated[
        int | None,
        typer.Option("--k", min=1, help="Neighbours of a class: KNN softmax.", show_default="none: partial FC"),
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Samples of a rank.")] = 128,
    shards: Annotated[int, typer.Option("--shards", help="Shards of the cluster.")] = 1,
    ranks: Annotated[int, typer.Option("--ranks", help="Ranks that train together.")] = 1,
    device: Annotated[str, typer.Option("--device", help="Of the features: cpu or cuda.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Print the memory of a class head by part, for each shard and rank, before anything is started."""
    from geartrain.ams.programs.selection import PartialFC
    from geartrain.bridge.head.defaults import DEFAULT_OPTIMIZER, DEFAULT_SELECT  # loads torch
    from geartrain.bridge.head.memory import memory_report
    from geartrain.bridge.head.selection.knn_selection import KNNSoftmax

    with_momentum = {None: DEFAULT_OPTIMIZER.name, True: "sparse_momentum", False: "sgd"}[momentum]
    select = DEFAULT_SELECT if sample_rate is None else PartialFC(sample_rate)
    report = memory_report(
        num_classes=classes,
        dim=dim,
        sub_centers=sub_centers,
        rows=cast(Any, rows),
        dtype=cast(Any, dtype),
        slot_dtype=cast(Any, slot_dtype or "float32"),
        optimizer=optimizer_of(optimizer or ("adam" if adam else with_momentum), {"lr": 0.1}),
        select=select if k is None else KNNSoftmax(0.1 if sample_rate is None else sample_rate, k=k),
        batch_size=batch_size,
        num_shards=shards,
        num_ranks=ranks,
        device=device,
    )
    print(json.dumps(report.to_json()) if as_json else f"{report}\n\n{report.explained()}")
