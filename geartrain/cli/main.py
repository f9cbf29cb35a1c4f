"""The command line: the list of commands, error messages and exit codes.

Only the module of the typed command is imported, so that roles start fast and never load torch.
Exit codes: 0 done, 1 failed at run time, 2 wrong usage (arguments, input or configuration that cannot be right), 130
Ctrl-C. Those of a training: 3 stopped by a signal and saved, 4 its cluster is lost or another process has the run, 130
stopped with nothing saved.
"""

from __future__ import annotations

import errno
import gc
import io
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

FAILED, TRY_LATER, INTERRUPTED = 1, 4, 130
_REFUSED = (PermissionError, NotADirectoryError, IsADirectoryError, FileExistsError)

# command -> place of its function or group, in the order of the help; those of roles come from the registry of roles
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
    """Return the application with the command that ``arguments`` name, or with all commands if they name none
    (help)."""
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

        Your network stays an ordinary module. A row for each id or class is stored on servers (shards) of one machine
        or many; a step moves only the rows it needs. Snapshots restore what a crash lost.

        To begin: 'geartrain quickstart --small' trains a classifier in under a minute, 'geartrain worker ctr --data
        movielens' a click model; 'geartrain up' starts a cluster on this machine, 'geartrain doctor' checks it for
        faults.
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
    return command() if name == "up" else command  # its flags are those of roles


def main() -> None:
    """Run the command line, then exit the process."""
    _complete_streams()
    # gRPC reads this when it is loaded. Its core's logs reach the person once, as a Geartrain error.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        require_no_token(sys.argv)
        if sys.argv[1:2] == ["plan"]:
            gc.disable()  # nothing imported is garbage, and the process is short: saves a tenth of its time
        build_app(sys.argv[1:])()
    except KeyboardInterrupt:  # while the command was imported; typer handles it later on
        sys.exit(INTERRUPTED)
    except GeartrainError as error:
        _print_error(printable(str(error)))  # the text may quote another process
        passes = isinstance(error, ShardRestarted | StaleCluster | Unavailable | RunHeld)
        sys.exit(TRY_LATER if passes and sys.argv[1:2] == ["worker"] else exit_code(error))
    except OSError as error:
        if isinstance(error, _REFUSED) or error.errno == errno.EROFS:
            named = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
            _print_error(f"{named}{error.strerror or error}; give a file or folder where you may read and write")
            sys.exit(WRONG_USAGE)
        if error.filename is not None:
            _print_error(f"{os.fsdecode(error.filename)}: {error.strerror}")
        elif error.errno in (errno.ENOSPC, errno.EDQUOT):  # a write error without a file name
            _print_error(f"{error.strerror}: free space, or give a folder on another disk")
        else:
            raise
        sys.exit(FAILED)


def _complete_streams() -> None:
    """Replace streams that the caller has closed, so that nothing else gets their numbers. Where the encoding of stdout
    lacks a character, "?" is printed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: PTH123, SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _print_error(what: str) -> None:
    is_coloured = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    print(f"\x1b[31m{ERROR_PREFIX}\x1b[0m{what}" if is_coloured else f"{ERROR_PREFIX}{what}", file=sys.stderr)


def exit_code(error: GeartrainError) -> int:
    """Return 2 for an error in the person's input, 1 for a failure at run time.

    NonFinite is a failure, although it is an InvalidArgument; TrainingDiverged is an input error (a learning rate).
    """
    given = isinstance(error, ConfigError | InvalidArgument | SourceError) and not isinstance(error, NonFinite)
    given |= isinstance(error, TrainingDiverged)
    return WRONG_USAGE if given else FAILED
