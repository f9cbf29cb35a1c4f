"""The command line: which commands there are, and how their errors reach a person.

A command's module is imported only when it is the one typed, so that roles start fast and never load torch.
Exit codes: 0 done, 1 failed at run time, 2 wrong usage: arguments, input or configuration that cannot be right; of a
training 3 stopped by a signal and saved, 4 its cluster is lost or another process has the run, 130 stopped with nothing
saved.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from geartrain.ams.values.config import require_no_token
from geartrain.ams.values.errors import (
    ConfigError,
    GeartrainError,
    InvalidArgument,
    NonFinite,
    RunHeld,
    ShardRestarted,
    SourceError,
    StaleCluster,
    TrainingDiverged,
    Unavailable,
)
from geartrain.ams.values.text import printable
from geartrain.cli.shared.help import ReadableCommand, ReadableGroup, readable
from geartrain.launch.child import ERROR_PREFIX, WRONG_USAGE
from geartrain.launch.roles import ROLES, load

FAILED, TRY_LATER = 1, 4

# command -> where its function or group is, in the order of the help; a role's is made of the registry of roles
COMMANDS = {
    "quickstart": "geartrain.cli.training.quickstart:quickstart",
    "up": "geartrain.cli.cluster.up:command",
    "status": "geartrain.cli.cluster.status:status",
    "events": "geartrain.cli.cluster.events:events",
    "top": "geartrain.cli.cluster.top:top",
    "dashboard": "geartrain.cli.cluster.dashboard:dashboard",
    "worker": "geartrain.cli.training.worker:app",
    "table": "geartrain.cli.cluster.table:app",
    "snapshot": "geartrain.cli.cluster.snapshot:app",
    "predict": "geartrain.cli.training.predict:predict",
    "verify": "geartrain.cli.training.verify:verify",
    **dict.fromkeys(ROLES, "geartrain.cli.cluster.roles:command_of"),
    "rollback": "geartrain.cli.serving.rollback:rollback",
    "health": "geartrain.cli.cluster.status:health",
    "certs": "geartrain.cli.cluster.certs:app",
    "config": "geartrain.cli.machine.config:app",
    "doctor": "geartrain.cli.machine.doctor:doctor",
    "export": "geartrain.cli.training.export:export",
    "samples": "geartrain.cli.training.samples:app",
    "plan": "geartrain.cli.training.plan:plan",
    "bench": "geartrain.cli.machine.bench:bench",
}


def _print_version(wanted: bool) -> None:
    if wanted:
        from geartrain.ams.values.rpc import version

        print(f"geartrain {version()}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
]


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """Return the application with the command that ``arguments`` name; with all, if they name none (help)."""
    app = typer.Typer(
        name="geartrain",
        cls=ReadableGroup,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    @readable
    def geartrain(
        version: bool = typer.Option(
            False, "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ) -> None:
        """Train PyTorch models whose first or last layer does not fit beside the network: clicks, faces, characters.

        Your network stays an ordinary module. A row for each id or class lies on servers (shards) of one machine or
        many; a step moves only the rows it needs. Snapshots bring back what a crash took.

        To begin: 'geartrain quickstart --small' trains a classifier in under a minute, 'geartrain worker ctr --data
        movielens' a model of clicks; 'geartrain up' starts a cluster on this machine, 'geartrain doctor' says what is
        wrong with it.
        """

    names = list(dict.fromkeys([*COMMANDS, *ROLES]))
    for name in [arguments[0]] if arguments and arguments[0] in names else names:
        command = _command(name)
        if isinstance(command, typer.Typer):
            for registered in command.registered_commands:
                assert registered.callback is not None
                below = registered.name or registered.callback.__name__
                readable(registered.callback, f"{name} {below}")
                registered.cls = ReadableCommand
            if command.registered_callback is not None and command.registered_callback.callback is not None:
                readable(command.registered_callback.callback, name)
            app.add_typer(command, name=name, cls=ReadableGroup)
        else:
            app.command(name, cls=ReadableCommand)(readable(command, name))
    return app


def _command(name: str) -> Any:
    if name in ROLES:
        return load("geartrain.cli.cluster.roles:command_of")(ROLES[name])
    command = load(COMMANDS[name])
    return command() if name == "up" else command  # its flags name roles


def main() -> None:
    """Run the command line and exit."""
    # Read when gRPC is loaded. What its core logs comes to the person as an error of ours, once and in words.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        require_no_token(sys.argv)
        if sys.argv[1:2] == ["plan"]:
            gc.disable()  # none of what it imports is garbage, and it ends soon: a tenth of its time
        build_app(sys.argv[1:])()
    except GeartrainError as error:
        _print_error(printable(str(error)))  # it may quote what another process said
        passes = isinstance(error, ShardRestarted | StaleCluster | Unavailable | RunHeld)
        sys.exit(TRY_LATER if passes and sys.argv[1:2] == ["worker"] else exit_code(error))
    except OSError as error:
        if error.filename is not None:
            _print_error(f"{os.fsdecode(error.filename)}: {error.strerror}")
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):  # of a write, which knows no name
            _print_error(f"{error.strerror}: free space, or give a folder on another disk")
        else:
            raise
        sys.exit(FAILED)


def _print_error(what: str) -> None:
    is_coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    print(f"\x1b[31m{ERROR_PREFIX}\x1b[0m{what}" if is_coloured else f"{ERROR_PREFIX}{what}", file=sys.stderr)


def exit_code(error: GeartrainError) -> int:
    """2 for what the person gave, 1 for what happened: rows that are NaN are not given, a rate that diverges is."""
    given = isinstance(error, ConfigError | InvalidArgument | SourceError) and not isinstance(error, NonFinite)
    given |= isinstance(error, TrainingDiverged)
    return WRONG_USAGE if given else FAILED
