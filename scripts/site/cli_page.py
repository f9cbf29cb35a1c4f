"""The page of the command line, from the typer application itself."""

from __future__ import annotations

import inspect

import click
import typer

from geartrain.cli.main import build_app

INTRODUCTION = """# Command line

```sh
geartrain up --shards 2      # in one terminal
geartrain status             # in another
```

Every command has `--help`; those that print data have `--json`. Exit codes: 0 done, 1 failed at run time, 2 wrong
arguments, input or configuration (130: ended by Ctrl-C, and saved). Options that are settings, too, override those of the
[configuration](configuration.md).
"""


def render() -> str:
    """Return the page: a section for each command, a table of what each takes."""
    root = typer.main.get_command(build_app([]))
    assert isinstance(root, click.Group | typer.core.TyperGroup)
    context = root.make_context("geartrain", [], resilient_parsing=True)
    names = root.list_commands(context)
    commands = [root.get_command(context, name) for name in names]
    lines = ["| Command | What it does |", "|---|---|"]
    lines += [
        f"| [`geartrain {name}`](#geartrain-{name}) | {_summary(c)} |" for name, c in zip(names, commands, strict=True)
    ]
    parts = [INTRODUCTION, "\n".join(lines)]
    for name, command in zip(names, commands, strict=True):
        parts += _sections(command, f"geartrain {name}", context, level=2)
    return "\n\n".join(parts) + "\n"


def _summary(command: click.Command) -> str:
    return " ".join((command.help or "").split("\n\n")[0].split()).replace("|", "\\|")


def _sections(command: click.Command, name: str, above: click.Context, level: int) -> list[str]:
    context = command.context_class(command, info_name=name.rpartition(" ")[2], parent=above, resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    parts = [
        f"{'#' * level} `{name}` {{ #{name.replace(' ', '-')} }}",
        f"    {name} {usage}",
        _prose(command.help or ""),
    ]
    rows = [
        _row(p, context) for p in command.get_params(context) if not getattr(p, "hidden", False) and p.name != "help"
    ]
    if rows:
        parts.append("\n".join(["| Takes | Default | What it is |", "|---|---|---|", *rows]))
    for sub in getattr(command, "commands", {}).values():
        if not sub.hidden:
            parts += _sections(sub, f"{name} {sub.name}", context, level + 1)
    return parts


def _prose(text: str) -> str:
    """Help as Markdown: what stands in braces or angles is shown as it is."""
    return inspect.cleandoc(text).replace("<", "\\<").replace("\b\n", "").replace("\f", "")


def _row(parameter: click.Parameter, context: click.Context) -> str:
    if isinstance(parameter, click.Argument):
        takes = f"`{parameter.make_metavar(context)}`"
    else:
        names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
        is_flag = getattr(parameter, "is_flag", False)
        takes = names if is_flag else f"{names} `{parameter.make_metavar(context)}`"
    shown = getattr(parameter, "show_default", None)
    default = shown if isinstance(shown, str) else parameter.get_default(context, call=False)
    if (
        default is None
        or default is False
        or default == []
        or default == ()
        or callable(default)
        or "Sentinel" in repr(default)
    ):
        default_text = "required" if parameter.required else ""
    else:
        default_text = f"`{default}`"
    help_text = " ".join((getattr(parameter, "help", "") or "").split())
    return f"| {takes.replace('|', '&#124;')} | {default_text} | {help_text.replace('|', '&#124;')} |"
