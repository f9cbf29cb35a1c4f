"""``geartrain up``: a whole cluster on this machine."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from geartrain.ams.observe import failpoints
from geartrain.ams.values.text import counted
from geartrain.cli.shared import configuration
from geartrain.cli.shared.options import ConfigFile, Insecure, Json, Mode
from geartrain.launch.up import ClusterFacts, Launcher


def up(
    file: ConfigFile = None,
    shards: Annotated[
        int | None, typer.Option("--shards", help="Shards of the cluster, by default one process each.")
    ] = None,
    scheduler_listen: Annotated[
        str | None, typer.Option("--scheduler-listen", help="host:port of the scheduler; port 0 picks a free one.")
    ] = None,
    data_port: Annotated[
        int | None,
        typer.Option("--data-port", help="Port for rows of the first shard; each further one takes the next."),
    ] = None,
    graph: Annotated[bool, typer.Option("--graph", help="Start a graph service, too.")] = False,
    graph_listen: Annotated[
        str | None, typer.Option("--graph-listen", help="host:port of the graph service; port 0 picks a free one.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart/--no-restart", help="Start a role that dies again, or end the cluster.")
    ] = True,
    data: Annotated[
        Path | None, typer.Option(help="Folder for what shall survive the cluster: FOLDER/scheduler, FOLDER/graph.")
    ] = None,
    insecure: Insecure = None,
    mode: Mode = None,
    as_json: Json = False,
) -> None:
    """Start a scheduler and its servers as processes of this machine, and end them on Ctrl-C or SIGTERM.

    Prints one line when every shard serves; the roles' logs go to stderr with their names before them.
    """
    state = None if data is None else str(data.absolute() / "scheduler")
    given = configuration.flags("scheduler", data=state, insecure=insecure)
    given += configuration.flags("scheduler", prefix="scheduler-", listen=scheduler_listen)
    given += configuration.flags("server", insecure=insecure, data_port=data_port)
    if graph or graph_listen is not None:
        kept = None if data is None else str(data.absolute() / "graph")
        given += configuration.flags("graph", data=kept, insecure=insecure)
        given += configuration.flags("graph", prefix="graph-", listen=graph_listen)
    if shards is not None:
        given.append(configuration.Setting("scheduler", "num_shards", shards, "flag --shards"))
    given += configuration.flags(configuration.WHOLE, mode=mode)
    config = configuration.load(file, given)
    failpoints.require_allowed(config.mode)  # here once, rather than by every child
    with Launcher(config, on_line=_print_log_line, graph=graph or graph_listen is not None) as launcher:
        facts = launcher.start()
        if facts is None:
            return
        if as_json:
            print(json.dumps({"ready": "cluster", **dataclasses.asdict(facts)}), flush=True)
        else:
            print(_ready_line(facts), flush=True)
        launcher.wait(restart=restart)


def _ready_line(facts: ClusterFacts) -> str:
    """``ready: scheduler 127.0.0.1:7000 (pid 12) · 2 shards (pid 13, 14)``."""
    pids = dict(facts.pids)
    scheduler, graph = pids.pop("scheduler"), pids.pop("graph", None)
    shards = f"{counted(len(facts.shards), 'shard')} (pid {', '.join(map(str, pids.values()))})"
    more = "" if facts.graph is None else f" · graph service {facts.graph} (pid {graph})"
    return f"ready: scheduler {facts.scheduler} (pid {scheduler}) · {shards}{more}"


def _print_log_line(line: str) -> None:
    sys.stderr.write(f"{line}\n")  # one write a line, so that lines of several children never mix
    sys.stderr.flush()
