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
SecurityFolder = Annotated[
    str | None,
    typer.Option("--security-folder", help="Folder of certificates (geartrain certs), under which all calls go."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value on stdout, and nothing else there.")]
OwnBackbone = Annotated[
    str | None,
    typer.Option(
        "--backbone",
        help="package.module:function, if the model's backbone is your own code: it is imported then.",
    ),
]
CacheFolder = Annotated[
    Path, typer.Option("--cache", envvar="GEARTRAIN_CACHE", help="Folder for downloaded fonts and drawn characters.")
]
RunMode = Annotated[
    str | None,
    typer.Option("--mode", help="development, or production, which refuses failpoints.", show_default="development"),
]
SchedulerAddress = Annotated[str | None, typer.Option("--scheduler", help="host:port of the scheduler.")]
GraphAddress = Annotated[str | None, typer.Option("--graph", help="host:port of the graph service.")]
