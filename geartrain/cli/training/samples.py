"""``geartrain samples``: preparation of samples for training."""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
import yaml

from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.text import counted, quoted, sized
from geartrain.cli.shared.options import Json
from geartrain.cli.shared.signals import exiting_in_order

app = typer.Typer(no_args_is_help=True, help="Make samples ready for training.")


@app.callback()
def samples() -> None:
    """Prepare samples for training."""


@app.command()
def compress(
    source: Annotated[str, typer.Argument(metavar="IN", help="Parquet or CSV: a file, folder, pattern or URL.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder.")],
    levels: Annotated[str, typer.Option(help="Columns, the outermost level first: user,page,item.")],
    level_columns: Annotated[
        list[str] | None,
        typer.Option("--level", help="Columns that tell nodes of a level apart: user=user,device. Repeatable."),
    ] = None,
    sort: Annotated[bool, typer.Option("--sort", help="Sort by the levels first.")] = False,
    columns: Annotated[
        list[str] | None,
        typer.Option("--column", help="Take this column: NAME, or NAME:TYPE (tags:list<int64>). Repeatable."),
    ] = None,
    fill: Annotated[
        list[str] | None, typer.Option(help="Stands for a missing value: year=-1, city=unknown. Repeatable.")
    ] = None,
    fold: Annotated[
        list[str] | None, typer.Option(help="Column of any 64-bit integers, which become ids. Repeatable.")
    ] = None,
    delimiter: Annotated[str, typer.Option(help="Of CSV.")] = ",",
    list_delimiter: Annotated[str, typer.Option(help="Of lists in CSV.")] = "|",
    compression: Annotated[str, typer.Option(help="Codec of the files: zstd, snappy, none, ...")] = "zstd",
    as_json: Json = False,
) -> None:
    """Compress samples to prefix trees: data that neighbours share (a user, a page) is stored, read and computed once.

    Columns that no level names go to the outermost level where they are constant. gt.TreeSamples reads the result.
    """
    from geartrain.workers.samples.files import require_arrow

    require_arrow()
    from geartrain.workers.samples.columns import ON_THE_COMMAND_LINE, remedies
    from geartrain.workers.samples.trees.compress import compress_samples

    named: dict[str, tuple[str, ...]] = {level: (level,) for level in levels.split(",")}
    for text in level_columns or []:
        level, own = _pair(text, "--level")
        if level not in named:
            raise ConfigError(f"--level {quoted(text)} is of a level that --levels {levels} does not name; add it")
        named[level] = tuple(own.split(","))
    typed = [text.partition(":") for text in columns or []]
    if any(kind for _, _, kind in typed) and not all(kind for _, _, kind in typed):
        raise ConfigError("give a type with every --column or with none")
    wanted = {name: kind for name, _, kind in typed} if any(kind for _, _, kind in typed) else [t[0] for t in typed]
    with remedies(ON_THE_COMMAND_LINE), exiting_in_order():
        report = compress_samples(
            source,
            out,
            named,
            sort=sort,
            columns=wanted or None,
            fill={name: _value(value) for name, value in (_pair(text, "--fill") for text in fill or [])},
            fold=fold or (),
            delimiter=delimiter,
            list_delimiter=list_delimiter,
            compression=compression,
        )
    if as_json:
        print(json.dumps(dataclasses.asdict(report)))
        return
    print(f"{counted(report.num_samples, 'sample')}, {sized(report.num_bytes)} in {out}")
    for level, nodes in report.nodes.items():
        each = report.num_samples / max(1, nodes)
        print(f"{level}: {counted(nodes, 'node')}, {each:.1f} samples each: {', '.join(report.columns[level])}")


def _pair(text: str, option: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name or not value:
        raise ConfigError(f"{option} is {quoted(text)}; it must be NAME=...")
    return name, value


def _value(text: str) -> float | str:
    """Return a number, a boolean, or a string without YAML's quotation marks, as --set reads them.

    Anything else that YAML reads, such as a list, a date or null, stays the text as given.
    """
    try:
        return int(text) if text.lstrip("-").isdecimal() else float(text)
    except ValueError:
        with suppress(yaml.YAMLError):
            if isinstance(value := yaml.safe_load(text), bool | str):
                return value
        return text
