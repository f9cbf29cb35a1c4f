"""``geartrain status`` and ``geartrain health``: how a cluster is, and whether one role answers."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from geartrain import configuration
from geartrain.ams.words import counted
from geartrain.cli_options import ConfigFile, Json, SchedulerAddress

if TYPE_CHECKING:
    from rich.table import Table

    from geartrain.ams.cluster import ClusterStatus


def status(file: ConfigFile = None, scheduler: SchedulerAddress = None, as_json: Json = False) -> None:
    """Show shards and tables of a running cluster; exits with 1 if it is not ready."""
    config = configuration.load(file, configuration.flags("server", scheduler=scheduler))
    from geartrain.ams.cluster import cluster_status  # after the settings are known to be right: it is slower

    found = cluster_status(config.server.scheduler, config=config.client)
    if as_json:
        print(json.dumps(dataclasses.asdict(found)))
    else:
        _print_tables(found, config.server.scheduler)
    if not found.ready:
        raise typer.Exit(1)


def health(
    address: Annotated[str, typer.Argument(help="host:port of a scheduler or a server.")],
    timeout_seconds: Annotated[float, typer.Option(min=0, help="How long to wait for an answer.")] = 2.0,
    as_json: Json = False,
) -> None:
    """Ask one role whether it serves (gRPC health protocol); exits with 1 if it does not."""
    from geartrain.ams.config import split_address
    from geartrain.ams.transport.grpc_health import is_serving

    split_address(address)
    serving = is_serving(address, timeout_seconds)
    facts = {"address": address, "serving": serving}
    print(json.dumps(facts) if as_json else f"{address}: {'serving' if serving else 'not serving'}")
    if not serving:
        raise typer.Exit(1)


def _print_tables(found: ClusterStatus, address: str) -> None:
    from rich.console import Console

    console = Console()
    up = sum(shard.state == "up" for shard in found.shards)
    state = "ready" if found.ready else "not ready"
    console.print(f"{state}: scheduler {address} · {up} of {counted(found.num_shards, 'shard')} up", highlight=False)
    console.print(_shard_table(found))
    if found.tables:
        console.print(_table_table(found))


def _shard_table(found: ClusterStatus) -> Table:
    from rich.table import Table

    table = Table("shard", "state", "address", "rows", "memory MiB", "up s", "beat s ago")
    table.columns[2].no_wrap = False
    table.columns[2].overflow = "fold"
    for shard in found.shards:
        table.add_row(
            str(shard.shard),
            shard.state,
            shard.address,
            f"{shard.rows:,}",
            f"{shard.memory_bytes / 2**20:.1f}",
            f"{shard.uptime_seconds:.0f}",
            "" if shard.state == "missing" else f"{shard.heartbeat_age_seconds:.1f}",
        )
    return table


def _table_table(found: ClusterStatus) -> Table:
    from rich.table import Table

    table = Table("table", "dim", "ids", "rows", "memory MiB", "pushes")
    for entry in found.tables:
        table.add_row(
            entry.name,
            str(entry.dim),
            "any" if entry.num_rows is None else f"{entry.num_rows:,}",
            f"{entry.rows:,}",
            f"{entry.memory_bytes / 2**20:.1f}",
            f"{entry.pushes:,}",
        )
    return table
