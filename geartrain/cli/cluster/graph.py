"""``geartrain graph``: the graph service as a process, and what a person asks of one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from geartrain.ams.observe import failpoints
from geartrain.ams.values.config import GraphConfig
from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.text import counted
from geartrain.cli.shared import configuration
from geartrain.cli.shared.options import (
    ConfigFile,
    GraphAddress,
    Insecure,
    Json,
    LogLevel,
    Mode,
    SchedulerAddress,
    SnapshotRoots,
    shows_defaults,
)
from geartrain.launch import role
from geartrain.launch.logs import log_to_stderr
from geartrain.launch.ports import require_free

if TYPE_CHECKING:
    from geartrain.ams.graph.client.remote import RemoteGraphs
    from geartrain.ams.values.graph_messages import GraphBuilding, GraphInfo

app = typer.Typer(
    help="Run the graph service, which builds and keeps the nearest classes of every class; or ask one that runs."
)
TableName = Annotated[str, typer.Argument(help="Name of the class table.")]


@app.callback(invoke_without_command=True)
@shows_defaults(GraphConfig)
def graph(
    context: typer.Context,
    file: ConfigFile = None,
    listen: Annotated[str | None, typer.Option(help="host:port to serve on; port 0 picks a free one.")] = None,
    scheduler: SchedulerAddress = None,
    data: Annotated[
        str | None, typer.Option(help="Folder for graphs and unfinished builds; by default they are in memory.")
    ] = None,
    memory_bytes: Annotated[
        int | None, typer.Option(help="For rows and candidates of a build; with less it reads rows more than once.")
    ] = None,
    snapshot_roots: SnapshotRoots = None,
    insecure: Insecure = None,
    mode: Mode = None,
    log_level: LogLevel = "info",
    end_with_parent: Annotated[bool, typer.Option("--end-with-parent", hidden=True)] = False,
) -> None:
    """Run the graph service, which builds and keeps the nearest classes of every class; or ask one that runs.

    Prints one line of JSON when it serves: {"ready": "graph", "address": ..., "pid": ...}.
    """
    if context.invoked_subcommand is not None:
        return
    log_to_stderr(log_level)
    if end_with_parent:
        role.end_with_parent()
    given = configuration.flags(
        "graph",
        listen=listen,
        scheduler=scheduler,
        data=data,
        memory_bytes=memory_bytes,
        snapshot_roots=snapshot_roots,
        insecure=insecure,
    )
    given += configuration.flags(configuration.WHOLE, mode=mode)
    whole = configuration.load(file, given)
    failpoints.arm_from_environment(whole.mode)
    from geartrain.ams.graph.service.role import GraphServer  # after the settings are known to be right: it is slower
    from geartrain.launch.graph_role import ConnectedCluster

    require_free(whole.graph.listen, "--listen")
    role.warn_if_open(whole.graph.listen)
    service = GraphServer(whole.graph, ConnectedCluster(whole.graph.scheduler, whole.client))
    address = service.start()
    role.serve("graph", service, address=address)


@app.command()
def build(
    table: TableName,
    k: Annotated[int, typer.Option("--k", min=1, help="Neighbours of each class.")] = 32,
    step: Annotated[int, typer.Option(min=0, help="Training step of the rows, to be kept with the graph.")] = 0,
    file: ConfigFile = None,
    graph: GraphAddress = None,
    as_json: Json = False,
) -> None:
    """Build the graph of a class table anew, in the service, and wait for it. Ctrl-C leaves it to the service.

    A build that the service did not live to finish goes on with what it had kept, if the rows are the same.
    """
    with _service(file, graph) as service, _progress(as_json) as progress:
        built = service.build(table, k, step=step, progress=progress)
    if as_json:
        print(json.dumps({**dataclasses.asdict(built.graph), "resumed_pairs": built.resumed_pairs}))
        return
    print(graph_line(built.graph))


@app.command()
def cancel(table: TableName, file: ConfigFile = None, graph: GraphAddress = None, as_json: Json = False) -> None:
    """End the build of a table's graph; exits with 1 if there is none. The graph that was there stays."""
    with _service(file, graph) as service:
        cancelled = service.cancel(table)
    facts = {"table": table, "cancelled": cancelled}
    print(json.dumps(facts) if as_json else f"{table}: {'cancelled' if cancelled else 'no graph of it is being built'}")
    if not cancelled:
        raise typer.Exit(1)


@app.command(name="list")
def list_(file: ConfigFile = None, graph: GraphAddress = None, as_json: Json = False) -> None:
    """List the graphs, what they were built from and how old they are, and the builds under way."""
    with _service(file, graph) as service:
        state = service.describe()
    if as_json:
        print(json.dumps(dataclasses.asdict(state)))
        return
    for info in state.graphs:
        print(graph_line(info))
    for building in state.building:
        print(f"{building.table}: being built, {_percent(building)} after {building.seconds:.0f} s")
    if not state.graphs and not state.building:
        print("there is no graph")


def graph_line(info: GraphInfo) -> str:
    """One graph in words: its version, size, size on the largest shard, and age."""
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
    from geartrain.ams.graph.client.remote import RemoteGraphs  # after the settings are known to be right: it is slower

    service = RemoteGraphs(config.graph, config)
    try:
        service.await_first_answer()
        yield service
    finally:
        service.close()


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[GraphBuilding], None]]:
    """One line on stderr: part of the pairs of rows compared, and the time that is left."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TextColumn("left"), TimeRemainingColumn(), console=Console(stderr=True), disable=quiet
    ) as bar:
        line = bar.add_task("graph", total=None)

        def show(building: GraphBuilding) -> None:
            total = building.total_pairs or None
            bar.update(line, description=f"graph of {building.table}", completed=building.done_pairs, total=total)

        yield show


def _percent(building: GraphBuilding) -> str:
    done = 100.0 * building.done_pairs / building.total_pairs if building.total_pairs else 0.0
    return f"{done:.0f} %"
