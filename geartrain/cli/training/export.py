"""``geartrain export``: a table of a running cluster as one safetensors file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from geartrain.cli.shared import configuration
from geartrain.cli.shared.options import ConfigFile, Json, SchedulerAddress


def export(
    table: Annotated[str, typer.Argument(help="Dense table, such as that of a class head.")],
    out: Annotated[Path, typer.Argument(help="FILE.safetensors to write: one tensor, weight, of shape classes x dim.")],
    file: ConfigFile = None,
    scheduler: SchedulerAddress = None,
    as_json: Json = False,
) -> None:
    """Write the rows of a table to one safetensors file, block by block: they may be more than memory holds."""
    config = configuration.load(file, configuration.flags("server", scheduler=scheduler))
    from geartrain.ams.client.cluster import connect  # after the settings are known to be right: it is slower
    from geartrain.bridge.head.weights import check_export_path, export_rows

    check_export_path(out)  # before anything is waited for
    with connect(config.server.scheduler, config=config.client) as cluster:
        opened = cluster.table(table)
        export_rows(opened, out)
    facts = {"file": str(out), "rows": opened.spec.num_rows, "dim": opened.spec.dim, "dtype": opened.spec.dtype}
    print(json.dumps(facts) if as_json else f"{opened.spec.num_rows:,} rows of dim {opened.spec.dim} are in {out}")
