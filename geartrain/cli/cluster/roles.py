"""Commands that run a role in this process, each made from the registry of roles: a flag for every setting."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from geartrain.ams.observe import failpoints, traces
from geartrain.cli.shared.options import ConfigFile, Json, RunMode, SecurityFolder
from geartrain.launch import configuration
from geartrain.launch import role as life
from geartrain.launch.logs import audit_to, log_to_stderr
from geartrain.launch.roles import RoleKind, load
from geartrain.ops import Role

LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error; logs go to stderr.")]
EndWithParent = Annotated[bool, typer.Option("--end-with-parent", hidden=True, help="End when stdin closes.")]


def command_of(role: RoleKind) -> Callable[..., None] | typer.Typer:
    """Return the command of a role; for a role that also answers commands while it runs, the group of them."""
    if role.commands is None:
        return run_command(role)
    app: typer.Typer = load(role.commands)
    app.callback(invoke_without_command=True)(run_command(role))
    return app


def run_command(role: RoleKind) -> Callable[..., None]:
    """Return a function for typer that runs ``role`` until it is stopped."""

    def run(
        context: typer.Context,
        file: Path | None,
        mode: str | None,
        security_folder: str | None,
        log_level: str,
        as_json: bool,
        end_with_parent: bool,
        **settings: Any,
    ) -> None:
        if context.invoked_subcommand is not None:
            return
        log_to_stderr(log_level)
        if end_with_parent:
            life.exit_with_parent()
        given = configuration.flags(role.name, **settings) + configuration.flags(configuration.WHOLE, mode=mode)
        given += configuration.flags("security", prefix="security-", folder=security_folder)
        whole = configuration.load(file, given)
        audit_to(whole.security.audit)
        failpoints.arm_from_environment(whole.mode)
        traces.start(role.name)
        life.raise_open_files()
        with Role(role.name, whole) as serving:
            life.serve(role.name, serving.service, as_json=as_json, **serving.facts)

    parameters: dict[str, tuple[Any, Any]] = {"context": (typer.Context, inspect.Parameter.empty)}
    parameters |= {"file": (ConfigFile, None)} | {key: _flag(key, of) for key, of in role.settings.model_fields.items()}
    parameters |= {
        "mode": (RunMode, None),
        "security_folder": (SecurityFolder, None),
        "log_level": (LogLevel, "info"),
        "as_json": (Json, False),
        "end_with_parent": (EndWithParent, False),
    }
    add_parameters(run, parameters)
    run.__doc__ = role.help
    return run


def add_parameters(function: Callable[..., Any], parameters: dict[str, tuple[Any, Any]]) -> None:
    """Give a function that takes ``**`` a signature with these parameters (annotation, default), for typer."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, kind, annotation=what, default=value) for name, (what, value) in parameters.items()]
    )
    function.__annotations__ = {name: what for name, (what, _) in parameters.items()}


def _flag(key: str, field: FieldInfo) -> tuple[Any, None]:
    """Return the flag of a setting; its value is None where it is not given."""
    kinds = [field.annotation]
    if get_origin(field.annotation) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(field.annotation) if kind is not type(None)]
    kind = kinds[0] if kinds[0] in (bool, int, float) else str
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    default = field.default not in (None, False, ()) and str(field.default)
    text = (field.description or "").replace("``", "").replace("\n", " ")
    if "argument" in extra:
        metavar = str(extra["argument"])
        return Annotated[list[str] | None, typer.Argument(help=text, metavar=metavar, show_default=False)], None
    names = [f"--{key.replace('_', '-')}", *([str(extra["flag"])] if extra else [])]
    return Annotated[kind | None, typer.Option(*names, help=text, show_default=default)], None
