"""Options that several commands share, each written once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path | None, typer.Option("--file", "-f", help="YAML configuration; the environment and flags override it.")
]
Insecure = Annotated[
    bool | None,
    typer.Option("--insecure", help="Allow addresses other machines can reach, without encryption or authentication."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value on stdout, and nothing else there.")]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error; logs go to stderr.")]
Mode = Annotated[
    str | None,
    typer.Option("--mode", help="development, or production, which refuses failpoints.", show_default="development"),
]
SchedulerAddress = Annotated[str | None, typer.Option("--scheduler", help="host:port of the scheduler.")]
GraphAddress = Annotated[str | None, typer.Option("--graph", help="host:port of the graph service.")]
