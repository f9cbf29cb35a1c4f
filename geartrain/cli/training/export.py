"""``geartrain export``: tables of a running cluster as versions for followers, or one file; a saved model as ONNX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from geartrain.ams.values.config import ClusterConfig
from geartrain.ams.values.errors import ConfigError
from geartrain.cli.shared import configuration
from geartrain.cli.shared.options import ConfigFile, Json, OwnBackbone, SchedulerAddress

_FILE = ".safetensors"
_OTHER_FILES = (".safetensor", ".pt", ".pth", ".bin", ".npy", ".npz", ".onnx", ".parquet", ".csv")


def export(
    table: Annotated[
        str,
        typer.Argument(
            help="Table; a pattern such as 'ctr/*' means several at one moment. With --onnx a run, or a model's folder."
        ),
    ],
    out: Annotated[
        str,
        typer.Argument(
            help="Folder or URL of versions, the same for all servers; or FILE.safetensors to write: one tensor, "
            "weight, of shape classes x dim, and of a hashed table also ids. With --onnx a folder."
        ),
    ],
    since: Annotated[
        int | None,
        typer.Option(min=0, help="Version that the new one adds to; 0: write all rows.", show_default="the newest one"),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on until Ctrl-C: a version whenever something was written.")
    ] = False,
    every: Annotated[
        float | None, typer.Option(min=0.05, help="Seconds between two versions of --follow.", show_default="10")
    ] = None,
    compact: Annotated[
        bool,
        typer.Option("--compact", help="Write the newest version of OUT as a whole one; no cluster is needed."),
    ] = False,
    keep: Annotated[
        int, typer.Option(min=1, help="Versions that --compact and --follow leave, and what those add to.")
    ] = 10,
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Export a saved model: its backbone as ONNX, centers and names beside it.")
    ] = False,
    backbone: OwnBackbone = None,
    file: ConfigFile = None,
    scheduler: SchedulerAddress = None,
    as_json: Json = False,
) -> None:
    """Write rows of a table, without the optimizer's state, as the next version in a folder: the first time all of
    them, later those written since. gt.TableFollower keeps a copy of it up to date in another process.

    --follow goes on until Ctrl-C and compacts old versions by itself. With --json it prints an object a line.

    Where OUT ends in .safetensors, all rows are written to that file, block by block: they may be more than memory
    holds.

    With --onnx a model is exported, without a cluster. Nothing is written unless onnxruntime gives the same features.
    'geartrain predict' takes the folder.
    """
    is_file = out.endswith(_FILE)
    if (onnx or is_file) and (follow or compact or since is not None):
        raise ConfigError("--since, --follow and --compact are for a folder of versions, not for a file or --onnx")
    if every is not None and not follow:
        raise ConfigError(f"--every {every:g} is the pause between versions of --follow; add --follow")
    if Path(out).suffix in _OTHER_FILES and not onnx:
        raise ConfigError(f"{out} is no file to export to; give FILE{_FILE}, or the name of a folder of versions")
    if onnx:
        _export_model(Path(table), Path(out), backbone, as_json)
        return
    config = configuration.load(file, configuration.flags("server", scheduler=scheduler))
    if is_file:
        _export_file(config, table, Path(out), as_json)
        return
    # After the settings are known to be right: it is slower.
    from geartrain.cli.training.export_versions import Exporter

    exporter = Exporter(config.server.scheduler, config.client, table, out, keep=keep, as_json=as_json)
    if compact:
        exporter.compact()
    elif follow:
        exporter.follow(10.0 if every is None else every, since)
    else:
        exporter.once(since)


def _export_file(config: ClusterConfig, table: str, out: Path, as_json: bool) -> None:
    from geartrain.ams.client.factory import connect
    from geartrain.bridge.head.weights import check_export_path, export_rows
    from geartrain.cli.training.export_versions import export_hashed

    check_export_path(out)  # before anything is waited for
    with connect(config.server.scheduler, config=config.client) as cluster:
        opened = cluster.table(table)
        num_rows = opened.spec.num_rows
        if num_rows is None:
            num_rows = export_hashed(cluster, table, out)
        else:
            export_rows(opened, out)
    facts = {"file": str(out), "rows": num_rows, "dim": opened.spec.dim, "dtype": opened.spec.dtype}
    print(json.dumps(facts) if as_json else f"{num_rows:,} rows of dim {opened.spec.dim} are in {out}")


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
