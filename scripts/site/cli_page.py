"""The pages of the command line, from the typer application itself."""

from __future__ import annotations

import inspect
import itertools
import re
from typing import Any

import typer

from geartrain.cli.main import COMMANDS, build_app

FOLDER = "reference/cli"
INTRODUCTION = """# Command line

```sh
geartrain up --shards 2      # in one terminal
geartrain status             # in another
```

Every command has `--help`; those that print data have `--json`. Exit codes: 0 done, 1 failed at run time, 2 wrong
arguments, input or configuration; of a training 3 a signal ended it and it is saved, 4 its cluster is lost, 130 nothing
is saved. Options that are settings, too, override those of the [configuration](../configuration.md).
"""


def render() -> dict[str, str]:
    """Return a page for each command, with a table of what it takes, and one that lists them."""
    root = typer.main.get_command(build_app([]))
    assert isinstance(root, typer.core.TyperGroup)
    context = typer.Context(root, info_name="geartrain", resilient_parsing=True)
    lines = ["| Command | What it does |", "|---|---|"]
    pages = {}
    for name in COMMANDS:
        command = root.commands[name]
        summary = (command.help or "").partition("\n\n")[0]
        lines.append(f"| [`geartrain {name}`]({name}.md) | {_cell(summary)} |")
        pages[f"{FOLDER}/{name}.md"] = "\n\n".join(_sections(command, f"geartrain {name}", context, level=1)) + "\n"
    return {f"{FOLDER}/index.md": INTRODUCTION + "\n" + "\n".join(lines) + "\n", **pages}


def _sections(command: Any, name: str, above: typer.Context, level: int) -> list[str]:
    """A command and the commands below it."""
    context = typer.Context(command, info_name=name.rpartition(" ")[2], parent=above, resilient_parsing=True)
    usage = command.get_usage(context).removeprefix("Usage: ")
    text, _, example = (command.help or "").partition("\n\nExample: ")
    parts = [
        f"{'#' * level} `{name}` {{ #{name.replace(' ', '-')} }}",
        f"```sh\n{example or usage}\n```",
        _prose(text),
    ]
    taken = [each for each in command.get_params(context) if not each.hidden and each.name != "help"]
    if taken:
        rows = []
        for title, group in itertools.groupby(taken, key=lambda each: each.rich_help_panel):
            rows += [f"| **{title}** | | |"] if title else []
            rows += [_row(*each.get_help_record(context)) for each in group]
        parts.append("\n".join([f"`{usage}`\n", "| Takes | What it is | Default |", "|---|---|---|", *rows]))
    for sub in getattr(command, "commands", {}).values():
        if not sub.hidden:
            parts += _sections(sub, f"{name} {sub.name}", context, level + 1)
    return parts


def _row(takes: str, meaning: str) -> str:
    """A row of the table of options; typer puts what holds without one in brackets, in parentheses where it is told."""
    meaning, default = re.fullmatch(r"(.*?)(?:\s*\[([^\[]*)\])?", " ".join(meaning.split())).groups("")
    default = re.sub(r"default: (?:\((.*?)\)|([^;]*))(?=;|$)", r"\1\2", default)
    return f"| `{takes.replace('|', '&#124;')}` | {_cell(meaning)} | {_cell(default)} |"


def _cell(text: str) -> str:
    """Text for a cell of a table."""
    return _prose(" ".join(text.split())).replace("|", "&#124;")


def _prose(text: str) -> str:
    """Help as Markdown: characters that Markdown or HTML would take for their own stand for themselves."""
    return re.sub(r"([<*_\[\]])", r"\\\1", inspect.cleandoc(text))
