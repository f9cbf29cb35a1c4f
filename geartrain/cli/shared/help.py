"""``--help`` of a command: an example, option values in words, and long lists of options in groups."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import ValidationError
from typer import BadParameter
from typer.core import TyperCommand, TyperGroup
from typer.models import OptionInfo

from geartrain.ams.values.config import error_text

Command = TypeVar("Command", bound=Callable[..., Any])

EXAMPLES = {
    "quickstart": "geartrain quickstart --small",
    "up": "geartrain up --shards 2 --dashboard",
    "status": "geartrain status --scheduler 127.0.0.1:7000",
    "events": "geartrain events --follow",
    "top": "geartrain top --scheduler 127.0.0.1:7000",
    "dashboard": "geartrain dashboard --scheduler 127.0.0.1:7000",
    "worker glyphs": "geartrain worker glyphs --out runs/glyphs",
    "worker classify": "geartrain worker classify --data pictures --out runs/pictures",
    "worker ctr": "geartrain worker ctr --data movielens --out runs/clicks",
    "worker tdm": "geartrain worker tdm --data movielens --out runs/tree",
    "table list": "geartrain table list",
    "table expire": "geartrain table expire ctr/user --json",
    "table alter": "geartrain table alter ctr/user --max-bytes 8000000000",
    "table drop": "geartrain table drop old/user old/item",
    "snapshot create": "geartrain snapshot create snapshots",
    "snapshot list": "geartrain snapshot list snapshots",
    "snapshot verify": "geartrain snapshot verify snapshots",
    "snapshot restore": "geartrain snapshot restore snapshots",
    "snapshot compact": "geartrain snapshot compact snapshots",
    "snapshot prune": "geartrain snapshot prune snapshots --keep 3",
    "predict": "geartrain predict runs/pictures a.png b.png",
    "verify": "geartrain verify runs/pictures pairs.txt",
    "scheduler": "geartrain scheduler --listen 127.0.0.1:7000",
    "server": "geartrain server --scheduler 127.0.0.1:7000 --shard 0",
    "slowgear": "geartrain slowgear --scheduler 127.0.0.1:7000 --name image --module mypkg.image:build --dim 64",
    "serve": "geartrain serve models/pictures --listen 127.0.0.1:8000",
    "rollback": "geartrain rollback 127.0.0.1:8000 pictures",
    "health": "geartrain health 127.0.0.1:7000",
    "graph": "geartrain graph --scheduler 127.0.0.1:7000",
    "graph build": "geartrain graph build pictures/classes",
    "graph cancel": "geartrain graph cancel pictures/classes",
    "graph list": "geartrain graph list",
    "certs init": "geartrain certs init certs",
    "certs issue": "geartrain certs issue certs/client client",
    "certs renew": "geartrain certs renew certs",
    "certs token": "geartrain certs token clicks certs --allow 'clicks/*=read,write'",
    "certs revoke": "geartrain certs revoke TOKEN certs",
    "certs backup": "geartrain certs backup certs authority.backup",
    "certs restore": "geartrain certs restore authority.backup certs",
    "config show": "geartrain config show --file geartrain.yaml",
    "config validate": "geartrain config validate geartrain.yaml",
    "doctor": "geartrain doctor",
    "export": "geartrain export runs/pictures --to models/pictures",
    "samples compress": "geartrain samples compress clicks.parquet clicks.trees --levels user,page",
    "plan": "geartrain plan --classes 100000000 --dim 512 --rows ranks --ranks 16",
    "bench": "geartrain bench head",
}
"""Example to type, by command."""

_WORDS = {bool: "", int: "N", float: "NUMBER", Path: "PATH", str: "TEXT"}
_GROUPS = {
    "The run's folder": "out|resume|continues|overwrite|snapshots|allow_fallback",
    "Addresses": r"(\w+_)?(listen|address|ports?)|advertise|reflection|scheduler|graph|grpc|origins|dashboard",
    "Options of many commands": "file|mode|insecure|security_folder|log_level|metrics|max_message_bytes|as_json|cache",
    "Times and limits": r"\w+_(seconds|millis|bytes|lag|per_second)|max_\w+|threads|workers|cpus|grace",
}
"""Title of a group -> parameters below it, for a command with many options."""
_MANY = 12


def readable(function: Command, name: str = "") -> Command:
    """Make ``--help`` of a command's function readable; ``name`` selects the example."""
    paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")  # the terminal wraps the lines
    function.__doc__ = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs).replace("`", "")
    if name in EXAMPLES and paragraphs[-1] != f"Example: {EXAMPLES[name]}":  # an application may be built again
        function.__doc__ += f"\n\nExample: {EXAMPLES[name]}"
    signature = inspect.signature(function, eval_str=True)
    function.__signature__ = signature  # type: ignore[attr-defined]  # else typer makes other options of its texts
    for parameter in signature.parameters.values():
        options = (*get_args(parameter.annotation), parameter.default)
        for option in (each for each in options if isinstance(each, OptionInfo)):
            option.metavar = option.metavar or _taken(parameter, option.help or "")
    return function


class _Grouped:
    """Command that names wrong values. Its help groups options where they are many, and shows no Python types such as
    ``<str>``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)  # type: ignore[misc, no-any-return]
        except BadParameter as exc:  # which names the option, but not its value
            if isinstance(exc.__cause__, ValidationError):
                exc.message = error_text(exc.__cause__.errors()[0])
            raise

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if param.param_type_name == "argument" or param.is_flag:
                param.display_type_rich = lambda ctx: None  # noqa: ARG005
            elif len(params) > _MANY and param.rich_help_panel is None:
                titles = (title for title, names in _GROUPS.items() if re.fullmatch(names, param.name))
                param.rich_help_panel = next(titles, None)
        places = {title: place for place, title in enumerate(_GROUPS)}
        return sorted(params, key=lambda param: places.get(param.rich_help_panel or "", -1))


class ReadableCommand(_Grouped, TyperCommand):
    """A single command with this help."""


class ReadableGroup(_Grouped, TyperGroup):
    """A group of commands with this help."""


def _taken(parameter: inspect.Parameter, meaning: str) -> str | None:
    """Return a word for an option's value; None where typer prints it, as for a choice."""
    annotation = parameter.annotation
    while get_origin(annotation) is not None or get_args(annotation):
        annotation = next(kind for kind in get_args(annotation) if kind is not type(None))
    is_address = parameter.name in ("scheduler", "graph", "address") or meaning.startswith("Address")
    if annotation is str and ("host:port" in meaning or is_address):
        return "HOST:PORT"
    return "FOLDER" if meaning.startswith("Folder") else _WORDS.get(annotation)
