"""``geartrain export``: a trained model to serve, or table rows for followers or as one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from geartrain.ams.values.config import ClusterConfig
from geartrain.ams.values.errors import ConfigError
from geartrain.cli.shared.options import CacheFolder, ConfigFile, Json, OwnBackbone, SchedulerAddress
from geartrain.cli.shared.signals import exiting_in_order
from geartrain.launch import configuration

_FILE = ".safetensors"
_OTHER_FILES = (".safetensor", ".pt", ".pth", ".bin", ".npy", ".npz", ".onnx", ".parquet", ".csv")


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RUN|TABLE",
            help="With --to a run, such as runs/quickstart, or its model folder. Without, a table; a pattern such as "
            "'ctr/*' means several at one moment.",
        ),
    ],
    out: Annotated[
        str | None,
        typer.Argument(
            help="Of a table: folder or URL of versions, the same for all servers; or FILE.safetensors to write: one "
            "tensor, weight, of shape classes x dim, and of a hashed table also ids.",
            show_default=False,
        ),
    ] = None,
    to: Annotated[
        Path | None,
        typer.Option(
            help="Folder to write the model of a run to: the network as ONNX, class centers and names. Replaced as a "
            "whole; where it holds versions (DIR/000120), one more.",
            show_default=False,
        ),
    ] = None,
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
        int | None,
        typer.Option(
            min=1,
            help="Versions that --compact and --follow leave, and what those add to. With --to: write a version into "
            "DIR, and leave so many.",
            show_default="10",
        ),
    ] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="The same as RUN --to OUT.")] = False,
    precision: Annotated[
        str,
        typer.Option(
            help="With --to: fp32, fp16 or int8, of the network's numbers. The held-out images tell what it costs."
        ),
    ] = "fp32",
    recall: Annotated[
        float,
        typer.Option(
            min=0.0, max=1.0, help="With --to: the share of questions whose best class must be found. 1: exact search."
        ),
    ] = 1.0,
    index: Annotated[
        str | None,
        typer.Option(
            help="With --to: exact, ivf, hnsw or flat (the last three of faiss).",
            show_default="the fastest that finds enough",
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="With --to: where the run's images are now.", show_default="as the run has it")
    ] = None,
    pairs: Annotated[
        Path | None,
        typer.Option(
            help="With --to: pairs of pictures as for 'geartrain verify', such as lfw.bin, by which a service says "
            "whether two show the same.",
            show_default=False,
        ),
    ] = None,
    examples: Annotated[
        bool,
        typer.Option(
            "--examples/--no-examples",
            help="With --to, of clicks: take along a few samples, without personal columns, for the page to try the "
            "model.",
        ),
    ] = True,
    backbone: OwnBackbone = None,
    cache: CacheFolder = Path(".cache"),
    file: ConfigFile = None,
    scheduler: SchedulerAddress = None,
    as_json: Json = False,
) -> None:
    """Write a trained model as a folder to serve, or rows of a table for its followers.

    With --to the model of a run is written, without a cluster, after a check that onnxruntime and PyTorch give the same
    features. 'geartrain serve', 'geartrain predict' and gt.load_model read the folder.

    Otherwise rows of a table, without the optimizer's state, become the next version in a folder: at first all rows,
    then those written since. TableFollower keeps a copy up to date in another process. --follow continues until Ctrl-C
    and compacts old versions by itself. With --json it prints an object a line.

    Where OUT ends in .safetensors, all rows are written to that file block by block, so they may exceed memory.
    """
    if to is None and out is None:
        raise ConfigError(f"where to? Give --to DIR for the model of a run, or an OUT for the rows of table {source}")
    if to is not None and out is not None:
        raise ConfigError(f"OUT is {out}, and --to {to}; a model goes to --to, rows of a table to OUT: leave one out")
    if onnx and out is not None:
        to, out = Path(out), None
    is_file = out is not None and out.endswith(_FILE)
    if (out is None or is_file) and (follow or compact or since is not None):
        raise ConfigError(
            "--since, --follow and --compact are for versions of a table, not for a file or a model; leave them out"
        )
    if every is not None and not follow:
        raise ConfigError(f"--every {every:g} is the pause between versions of --follow; add --follow")
    if to is not None:
        # torch is loaded after the arguments are checked
        from geartrain.cli.training.export_models import ModelExport, export_run

        settings = ModelExport(
            precision=precision,
            recall=recall,
            index=index,
            backbone=backbone,
            data=data,
            cache=cache,
            keep=keep,
            pairs=pairs,
            examples=examples,
        )
        with exiting_in_order():
            export_run(Path(source), to, settings, as_json=as_json)
        return
    assert out is not None
    if Path(out).suffix in _OTHER_FILES:
        raise ConfigError(f"{out} is no file to export to; give FILE{_FILE}, or the name of a folder of versions")
    config = configuration.load(file, configuration.flags("server", scheduler=scheduler))
    if is_file:
        _export_file(config, source, Path(out), as_json)
        return
    # Slow to import: only after the settings are checked.
    from geartrain.cli.training.export_versions import Exporter

    exporter = Exporter(config.server.scheduler, config.client, source, out, keep=keep or 10, as_json=as_json)
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

    check_export_path(out)  # before waiting for anything
    with exiting_in_order(), connect(config.server.scheduler, config=config.client) as cluster:
        opened = cluster.table(table)
        num_rows = opened.spec.num_rows
        if num_rows is None:
            num_rows = export_hashed(cluster, table, out)
        else:
            export_rows(opened, out)
    facts = {"file": str(out), "rows": num_rows, "dim": opened.spec.dim, "dtype": opened.spec.dtype}
    print(json.dumps(facts) if as_json else f"{num_rows:,} rows of dim {opened.spec.dim} are in {out}")
