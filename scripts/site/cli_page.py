"""The page of the command line, from the typer application itself."""

from __future__ import annotations

import inspect
import re
from typing import Any

import typer

from geartrain.cli.main import COMMANDS, build_app

INTRODUCTION = """# Command line

```sh
geartrain up --shards 2      # in one terminal
geartrain status             # in another
```

Every command has `--help`; those that print data have `--json`. Exit codes: 0 done, 1 failed at run time, 2 wrong
arguments, input or configuration; of a training 3 a signal ended it and it is saved, 4 its cluster is lost, 130 nothing
is saved. Options that are settings, too, override those of the [configuration](configuration.md).
"""


def render() -> str:
    """Return the page: a section for each command, a table of what each takes."""
    root = typer.main.get_command(build_app([]))
    assert isinstance(root, typer.core.TyperGroup)
    context = typer.Context(root, info_name="geartrain", resilient_parsing=True)
    lines = ["| Command | What it does |", "|---|---|"]
    sections = []
    for name in COMMANDS:
        command = root.commands[name]
        summary = (command.help or "").partition("\n\n")[0]
        lines.append(f"| [`geartrain {name}`](#geartrain-{name}) | {_cell(summary)} |")
        sections += _sections(command, f"geartrain {name}", context, level=2)
    return "\n\n".join([INTRODUCTION, "\n".join(lines), *sections]) + "\n"


def _sections(command: Any, name: str, above: typer.Context, level: int) -> list[str]:
    """A command and the commands below it."""
    context = typer.Context(command, info_name=name.rpartition(" ")[2], parent=above, resilient_parsing=True)
    usage = command.get_usage(context).removeprefix("Usage: ")
    parts = [
        f"{'#' * level} `{name}` {{ #{name.replace(' ', '-')} }}",
        f"```text\n{usage}\n```",
        _prose(command.help or ""),
    ]
    records = [parameter.get_help_record(context) for parameter in command.params if not parameter.hidden]
    if records:
        rows = [f"| `{takes.replace('|', '&#124;')}` | {_cell(meaning)} |" for takes, meaning in records]
        parts.append("\n".join(["| Takes | What it is |", "|---|---|", *rows]))
    for sub in getattr(command, "commands", {}).values():
        if not sub.hidden:
            parts += _sections(sub, f"{name} {sub.name}", context, level + 1)
    return parts


def _cell(text: str) -> str:
    """Text for a cell of a table."""
    return _prose(" ".join(text.split())).replace("|", "&#124;")


def _prose(text: str) -> str:
    """Help as Markdown: characters that Markdown or HTML would take for their own stand for themselves."""
    return re.sub(r"([<*_\[\]])", r"\\\1", inspect.cleandoc(text))
