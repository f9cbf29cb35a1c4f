"""``geartrain status`` and ``geartrain health``: how a cluster is, and whether one role answers."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from geartrain.ams.values.text import counted
from geartrain.cli import configuration
from geartrain.cli.options import ConfigFile, GraphAddress, Json, SchedulerAddress
from geartrain.cli.table import why_incomplete

if TYPE_CHECKING:
    from rich.table import Table

    from geartrain.ams.client.cluster_status import ClusterStatus
    from geartrain.ams.values.config import ClientConfig
    from geartrain.ams.values.gear_messages import GearState
    from geartrain.ams.values.graph_messages import GraphsState


def status(
    file: ConfigFile = None,
    scheduler: SchedulerAddress = None,
    graph: GraphAddress = None,
    as_json: Json = False,
) -> None:
    """Show shards, tables and slow gears of a running cluster, and its graphs with --graph; exits with 1 if it is not
    ready."""
    given = configuration.flags("server", scheduler=scheduler) + configuration.flags("client", graph=graph)
    config = configuration.load(file, given)
    # After the settings are known to be right: it is slower.
    from geartrain.ams.client.cluster_status import cluster_status, slow_gear_status

    found = cluster_status(config.server.scheduler, config=config.client)
    gears, silent = slow_gear_status(config.server.scheduler, config=config.client)
    graphs, complaint = (None, None) if config.client.graph is None else _graphs(config.client.graph, config.client)
    if as_json:
        asked = {} if config.client.graph is None else {"graph_service": graphs and dataclasses.asdict(graphs)}
        told = [dataclasses.asdict(gear) for gear in gears]
        print(json.dumps({**dataclasses.asdict(found), "slow_gears": told, **asked}))
    else:
        _print_tables(found, config.server.scheduler)
        _print_gears(gears)
        if graphs is not None:
            _print_graphs(graphs, str(config.client.graph))
    complaints = [*silent, *([] if complaint is None else [complaint])]
    for line in complaints:
        print(line, file=sys.stderr)
    if not found.ready or complaints:
        raise typer.Exit(1)


def _print_gears(gears: list[GearState]) -> None:
    for name in sorted({gear.name for gear in gears}):
        print(f"slow gears of {name}")
        for gear in gears:
            if gear.name == name:
                print(f"  {gear_line(gear)}")
        if lost := lost_gradients([gear for gear in gears if gear.name == name]):
            print(f"  lost with slow gears that died: {counted(lost, 'gradient')}")


def lost_gradients(gears: list[GearState]) -> int:
    """Of all fast gears, as the slow gears of one dense part have heard it from them."""
    heard: dict[str, int] = {}
    for gear in gears:
        for source, lost in gear.lost.items():
            heard[source] = max(lost, heard.get(source, 0))
    return sum(heard.values())


def gear_line(gear: GearState) -> str:
    """One slow gear in words: what it holds, what its cache serves, what became of the gradients it was given."""
    asked = gear.cache_hits + gear.cache_misses
    rate = f"{100 * gear.cache_hits / asked:.0f} % of {asked:,} from its cache" if asked else "no feature asked for"
    account = gear.account
    dropped = account.dropped_stale + account.dropped_failed + account.non_finite
    error = f"; does not apply what is due: {gear.error}" if gear.error else ""
    return (
        f"{gear.address}: {counted(len(gear.partitions), 'partition')}, dense version {gear.dense_version}, {rate}, "
        f"{gear.queued_ids} ids queued; gradients: {account.received:,} received, {account.applied:,} applied, "
        f"{account.waiting:,} waiting, {account.due:,} due, {dropped:,} dropped{error}"
    )


def _graphs(address: str, config: ClientConfig) -> tuple[GraphsState | None, str | None]:
    """What the graph service has, or why that is not known."""
    from geartrain.ams.graph.client.remote import RemoteGraphs
    from geartrain.ams.values.errors import GraphUnavailable

    service = RemoteGraphs(address, config.model_copy(update={"recovery_timeout_seconds": 0.0}))
    try:
        return service.describe(), None
    except GraphUnavailable as exc:
        return None, str(exc)
    finally:
        service.close()


def _print_graphs(graphs: GraphsState, address: str) -> None:
    from geartrain.cli.graph import graph_line

    print(f"graph service {address} · {counted(len(graphs.graphs), 'graph')}, {len(graphs.building)} being built")
    for info in graphs.graphs:
        print(f"  {graph_line(info)}")


def health(
    address: Annotated[str, typer.Argument(help="host:port of a scheduler, a server, a graph service or a slow gear.")],
    timeout_seconds: Annotated[float, typer.Option(min=0, help="How long to wait for an answer.")] = 2.0,
    as_json: Json = False,
) -> None:
    """Ask one role whether it serves (gRPC health protocol); exits with 1 if it does not."""
    from geartrain.ams.rpc.health import is_serving
    from geartrain.ams.values.config import split_address

    split_address(address)
    serving = is_serving(address, timeout_seconds)
    facts = {"address": address, "serving": serving}
    print(json.dumps(facts) if as_json else f"{address}: {'serving' if serving else 'not serving'}")
    if not serving:
        raise typer.Exit(1)


def _print_tables(found: ClusterStatus, address: str) -> None:
    from geartrain.cli.consoles import table_console

    console = table_console()
    up = sum(shard.state == "up" for shard in found.shards)
    state = "ready" if found.ready else "not ready"
    console.print(f"{state}: scheduler {address} · {up} of {counted(found.num_shards, 'shard')} up", highlight=False)
    console.print(_shard_table(found))
    if found.tables:
        console.print(_table_table(found))
    for name in found.incomplete_tables:
        console.print(f"table {name}: {why_incomplete(found, name)}", highlight=False, markup=False)


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
