"""Options that several commands share, each written once."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer
from pydantic import BaseModel
from typer.models import OptionInfo

Command = TypeVar("Command", bound=Callable[..., Any])

ConfigFile = Annotated[
    Path | None, typer.Option("--file", "-f", help="YAML configuration; the environment and flags override it.")
]
Insecure = Annotated[
    bool | None,
    typer.Option("--insecure", help="Allow addresses other machines can reach, without encryption or authentication."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value on stdout, and nothing else there.")]
OwnBackbone = Annotated[
    str | None,
    typer.Option(
        "--backbone",
        help="package.module:function, if the model's backbone is your own code: it is imported then.",
    ),
]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error; logs go to stderr.")]
Mode = Annotated[
    str | None,
    typer.Option("--mode", help="development, or production, which refuses failpoints.", show_default="development"),
]
SnapshotRoots = Annotated[
    str | None,
    typer.Option(
        "--snapshot-roots",
        help="Folders and URLs below which it reads and writes snapshots, as /snapshots,s3://bucket/runs; needed for "
        "them on an address that other machines can reach, and for other users of this one.",
    ),
]
SchedulerAddress = Annotated[str | None, typer.Option("--scheduler", help="host:port of the scheduler.")]
GraphAddress = Annotated[str | None, typer.Option("--graph", help="host:port of the graph service.")]


def shows_defaults(section: type[BaseModel]) -> Callable[[Command], Command]:
    """Let the help of a command whose options override a configuration's section say what that has by default."""

    def shown(command: Command) -> Command:
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
            kind, *options = get_args(parameter.annotation) or (parameter.annotation,)
            field = section.model_fields.get(name)
            if field is None or field.is_required() or field.default is None or field.default is False or not options:
                continue
            option: OptionInfo = copy.copy(options[0])  # others share it
            option.show_default = str(field.default)
            command.__annotations__[name] = Annotated[kind, option]
        return command

    return shown
