"""``geartrain graph build``, ``cancel``, ``list``: commands to a running graph service."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from geartrain.ams.values.config import ClusterConfig
from geartrain.ams.values.errors import ConfigError, GraphUnavailable
from geartrain.ams.values.text import counted
from geartrain.cli.shared.consoles import progress_bar
from geartrain.cli.shared.options import ConfigFile, GraphAddress, Json
from geartrain.launch import configuration
from geartrain.launch.roles import Report

if TYPE_CHECKING:
    from geartrain.ams.graph.client.remote import RemoteGraphs
    from geartrain.ams.values.graph_messages import GraphInfo
    from geartrain.ams.values.rpc import Pong

app = typer.Typer()
TableName = Annotated[str, typer.Argument(help="Name of the class table.")]


@app.command()
def build(
    table: TableName,
    k: Annotated[int, typer.Option("--k", min=1, help="Neighbours of each class.")] = 32,
    step: Annotated[int, typer.Option(min=0, help="Training step of the rows, to be kept with the graph.")] = 0,
    file: ConfigFile = None,
    graph: GraphAddress = None,
    as_json: Json = False,
) -> None:
    """Rebuild the graph of a class table in the graph service, and wait for it. Ctrl-C stops only the waiting.

    If the service was restarted during an earlier build of the same rows, the build resumes from the parts it had
    stored.
    """
    with _service(file, graph) as service, progress_bar(f"graph of {table}", quiet=as_json) as show:
        built = service.build(table, k, step=step, progress=lambda far: show(far.done_pairs, far.total_pairs))
    if as_json:
        print(json.dumps({**dataclasses.asdict(built.graph), "resumed_pairs": built.resumed_pairs}))
        return
    print(graph_line(built.graph))


@app.command()
def cancel(table: TableName, file: ConfigFile = None, graph: GraphAddress = None, as_json: Json = False) -> None:
    """Cancel the build of a table's graph; exits with 1 if there is none. The existing graph stays."""
    with _service(file, graph) as service:
        cancelled = service.cancel(table)
    facts = {"table": table, "cancelled": cancelled}
    print(json.dumps(facts) if as_json else f"{table}: {'cancelled' if cancelled else 'no graph of it is being built'}")
    if not cancelled:
        raise typer.Exit(1)


@app.command(name="list")
def list_(file: ConfigFile = None, graph: GraphAddress = None, as_json: Json = False) -> None:
    """List the graphs, with the rows they were built from and their age, and the builds in progress."""
    with _service(file, graph) as service:
        state = service.describe()
    if as_json:
        print(json.dumps(dataclasses.asdict(state)))
        return
    for info in state.graphs:
        print(graph_line(info))
    for building in state.building:
        done = 100.0 * building.done_pairs / building.total_pairs if building.total_pairs else 0.0
        print(f"{building.table}: being built, {done:.0f} % after {building.seconds:.0f} s")
    if not state.graphs and not state.building:
        print("there is no graph")


def report_of_graphs(config: ClusterConfig) -> Report | None:
    """Return the part of ``geartrain status`` about graphs: those of the client settings' service; None without one."""
    from geartrain.ams.graph.client.remote import RemoteGraphs
    from geartrain.cli.cluster.status import age

    address = config.client.graph
    if address is None:
        return None
    service = RemoteGraphs(address, config.client.model_copy(update={"recovery_timeout_seconds": 0.0}))
    try:
        found = service.describe()
    except GraphUnavailable as exc:
        return Report(addresses={}, facts={"graph_service": None}, show=lambda _: None, complaints=[str(exc)])
    finally:
        service.close()

    def print_row(pongs: Mapping[str, Pong]) -> None:
        counts = f"{counted(len(found.graphs), 'graph')}, {len(found.building)} being built"
        print(f"graph service {address}{age(pongs.get(address))} · {counts}")
        for info in found.graphs:
            print(f"  {graph_line(info)}")

    facts = {"graph_service": dataclasses.asdict(found)}
    return Report(addresses={address: "graph"}, facts=facts, show=print_row)


def graph_line(info: GraphInfo) -> str:
    """Return a line about one graph: its version, size, size on the largest shard, and age."""
    from geartrain.ams.graph.service.store import GraphSizes

    size = str(GraphSizes(info.whole_bytes, info.shard_bytes or (info.whole_bytes,)))
    age = "age unknown" if info.age_writes is None else f"{counted(info.age_writes, 'write')} old"
    classes = counted(info.num_classes, "class", "classes")
    return f"{info.table}: version {info.version} of step {info.step}, {classes}, k {info.k}, {size}, {age}"


@contextmanager
def _service(file: Path | None, address: str | None) -> Iterator[RemoteGraphs]:
    config = configuration.load(file, configuration.flags("client", graph=address)).client
    if config.graph is None:
        raise ConfigError("which graph service? Give --graph HOST:PORT, or client.graph (GEARTRAIN_CLIENT__GRAPH)")
    from geartrain.ams.graph.client.remote import RemoteGraphs  # slow to import: only after the settings are checked

    service = RemoteGraphs(config.graph, config)
    try:
        service.await_first_answer()
        yield service
    finally:
        service.close()
