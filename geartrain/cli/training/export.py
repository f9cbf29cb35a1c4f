"""``geartrain export``: a table of a running cluster as one safetensors file, or a saved model as ONNX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from geartrain.cli.shared import configuration
from geartrain.cli.shared.options import ConfigFile, Json, OwnBackbone, SchedulerAddress


def export(
    table: Annotated[
        str, typer.Argument(help="Dense table, such as that of a class head; with --onnx a run, or a model's folder.")
    ],
    out: Annotated[
        Path,
        typer.Argument(
            help="FILE.safetensors to write: one tensor, weight, of shape classes x dim. With --onnx a folder."
        ),
    ],
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Export a saved model: its backbone as ONNX, centers and names beside it.")
    ] = False,
    backbone: OwnBackbone = None,
    file: ConfigFile = None,
    scheduler: SchedulerAddress = None,
    as_json: Json = False,
) -> None:
    """Write the rows of a table to one safetensors file, block by block: they may be more than memory holds.

    With --onnx a model is exported, without a cluster. Nothing is written unless onnxruntime gives the same features.
    'geartrain predict' takes the folder.
    """
    if onnx:
        _export_model(Path(table), out, backbone, as_json)
        return
    config = configuration.load(file, configuration.flags("server", scheduler=scheduler))
    from geartrain.ams.client.cluster import connect  # after the settings are known to be right: it is slower
    from geartrain.bridge.head.weights import check_export_path, export_rows

    check_export_path(out)  # before anything is waited for
    with connect(config.server.scheduler, config=config.client) as cluster:
        opened = cluster.table(table)
        export_rows(opened, out)
    facts = {"file": str(out), "rows": opened.spec.num_rows, "dim": opened.spec.dim, "dtype": opened.spec.dtype}
    print(json.dumps(facts) if as_json else f"{opened.spec.num_rows:,} rows of dim {opened.spec.dim} are in {out}")


def _export_model(model: Path, out: Path, backbone: str | None, as_json: bool) -> None:
    from geartrain.workers.models.trained_model import load_model

    loaded = load_model(model, backbone=backbone)
    parity = loaded.export_onnx(out)
    num_classes, dim = len(loaded.centers), loaded.centers.shape[-1]
    facts = {"folder": str(out), "classes": num_classes, "dim": dim, "largest_distance": parity.largest_distance}
    print(
        json.dumps(facts)
        if as_json
        else f"{out} holds a backbone of {dim} features and {num_classes:,} classes; onnxruntime's features are "
        f"{parity.largest_distance:.1e} of their length from PyTorch's ({parity.images} images)"
    )
