"""``geartrain dashboard``: a page that shows a running cluster."""

from __future__ import annotations

from typing import Annotated

import typer

from geartrain.cli.cluster.roles import EndWithParent, LogLevel
from geartrain.cli.shared.clusters import settings
from geartrain.cli.shared.options import ConfigFile, GraphAddress, Json, SchedulerAddress

DEFAULT_LISTEN = "127.0.0.1:7080"


def dashboard(
    file: ConfigFile = None,
    scheduler: SchedulerAddress = None,
    graph: GraphAddress = None,
    listen: Annotated[str, typer.Option(help="host:port of the page; port 0 picks a free one.")] = DEFAULT_LISTEN,
    link: Annotated[
        bool, typer.Option("--link", help="Print a link for another browser to the one that listens there, and end.")
    ] = False,
    log_level: LogLevel = "info",
    as_json: Json = False,
    end_with_parent: EndWithParent = False,
) -> None:
    """Show a running cluster in a browser: shards, tables, jobs with their losses, snapshots, live events.

    Prints a link once it serves; the link opens the page in one browser, once. --link prints another. With --json, or
    where stdout is no terminal, it prints a line of JSON: {"ready": "dashboard", "url": ..., ...}.
    """
    if link:
        from geartrain.watch.page import link_to

        print(link_to(listen))
        return
    from geartrain.launch import role as life
    from geartrain.launch.logs import log_to_stderr

    log_to_stderr(log_level)
    if end_with_parent:
        life.exit_with_parent()
    config = settings(file, scheduler, graph)
    from geartrain.watch.page import Dashboard

    page = Dashboard(config, listen)
    life.serve("dashboard", page, as_json=as_json, address=page.address, url=page.url)
