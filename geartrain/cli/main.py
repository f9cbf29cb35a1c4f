"""The command line: which commands there are, and how their errors reach a person.

A command's module is imported only when it is the one typed, so that roles start fast and never load torch.
Exit codes: 0 done, 1 failed at run time, 2 wrong usage: arguments, input or configuration that cannot be right.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from geartrain.ams.values.errors import ConfigError, GeartrainError, InvalidArgument, NonFinite

FAILED, WRONG_USAGE = 1, 2
ERROR_PREFIX = "error: "
"""Begins the line on stderr with which a command fails."""

# command -> (module, its function or group), in the order of the help
COMMANDS = {
    "up": ("geartrain.cli.up", "up"),
    "status": ("geartrain.cli.status", "status"),
    "worker": ("geartrain.cli.worker", "app"),
    "table": ("geartrain.cli.table", "app"),
    "snapshot": ("geartrain.cli.snapshot", "app"),
    "predict": ("geartrain.cli.predict", "predict"),
    "verify": ("geartrain.cli.verify", "verify"),
    "scheduler": ("geartrain.cli.roles", "scheduler"),
    "server": ("geartrain.cli.roles", "server"),
    "graph": ("geartrain.cli.graph", "app"),
    "slowgear": ("geartrain.cli.slowgear", "slowgear"),
    "health": ("geartrain.cli.status", "health"),
    "config": ("geartrain.cli.config", "app"),
    "doctor": ("geartrain.cli.doctor", "doctor"),
    "failpoints": ("geartrain.cli.failpoints", "failpoints"),
    "export": ("geartrain.cli.export", "export"),
    "plan": ("geartrain.cli.plan", "plan"),
    "bench": ("geartrain.cli.bench", "bench"),
}


def _print_version(wanted: bool) -> None:
    if wanted:
        from geartrain import __version__

        print(f"geartrain {__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
]


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """Return the application with the command that ``arguments`` name; with all, if they name none (help)."""
    app = typer.Typer(
        name="geartrain",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def geartrain(
        version: bool = typer.Option(
            False, "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ) -> None:
        """Train classifiers of very many classes with PyTorch: faces, products, characters.

        Your network stays an ordinary module. Its last layer, one row for each class, lies on servers (shards) of one
        machine or many; a step moves only the rows it needs. Snapshots bring back what a crash took.

        To begin: 'geartrain quickstart --small' trains a model in under a minute, 'geartrain up' starts a cluster on
        this machine, 'geartrain doctor' says what is wrong with it.
        """

    wanted = [arguments[0]] if arguments and arguments[0] in COMMANDS else list(COMMANDS)
    for name in wanted:
        module, attribute = COMMANDS[name]
        command = getattr(importlib.import_module(module), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
    return app


def main() -> None:
    """Run the command line and exit."""
    # Read when gRPC is loaded. What its core logs comes to the person as an error of ours, once and in words.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        build_app(sys.argv[1:])()
    except GeartrainError as error:
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr)
        sys.exit(exit_code(error))
    except OSError as error:
        if error.filename is None:
            raise
        print(f"{ERROR_PREFIX}{error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(FAILED)


def exit_code(error: GeartrainError) -> int:
    """2 for what the person gave, 1 for what happened. (Values that diverge in a training are not given.)"""
    given = isinstance(error, ConfigError | InvalidArgument) and not isinstance(error, NonFinite)
    return WRONG_USAGE if given else FAILED
