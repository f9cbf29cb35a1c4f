"""``geartrain bench``: Geartrain against its rivals, measured on this machine."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from geartrain.cli.shared.consoles import print_table
from geartrain.cli.shared.options import Json

if TYPE_CHECKING:
    from geartrain.launch.bench import Result


def bench(
    name: Annotated[
        str | None,
        typer.Argument(help="Which bench, or a file of one: rows, rows_inprocess.", show_default="list them"),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Also cases that take longer than a minute.")] = False,
    folder: Annotated[Path, typer.Option(help="The benchmarks folder of a checkout.")] = Path("benchmarks"),
    as_json: Json = False,
) -> None:
    """Measure Geartrain against a rival in one run; a ratio above 1 means that Geartrain wins. Without a name: list the
    benches, and what each of their files measures."""
    from geartrain.launch.bench import benches, machine, run_bench

    if name is None:
        found = benches(folder)
        print(json.dumps(found) if as_json else _list_of(found))
        return
    results = []
    # Benches print to people: stdout is for the figures alone.
    with contextlib.redirect_stdout(sys.stderr):
        for result in run_bench(name, folder, full=full):
            print(f"{result['case']}: {result['ratio']:.2f} x", flush=True)
            results.append(result)
    if as_json:
        print(json.dumps({"bench": name, "machine": machine(), "results": results}))
    else:
        _print_table(results)


def _list_of(found: Mapping[str, Mapping[str, str]]) -> str:
    width = max(len(file) for files in found.values() for file in files)
    lines = []
    for name, files in found.items():
        lines.append(f"geartrain bench {name}")
        lines += [f"  {file:<{width}}  {sentence}" for file, sentence in files.items()]
    return "\n".join(lines)


def _print_table(results: Sequence[Result]) -> None:
    rows = [
        (
            result["case"],
            f"{result['ours']:.4g}",
            f"{result['theirs']:.4g}",
            result["unit"],
            result["rival"],
            _coloured(result["ratio"], result["target"]),
            "" if result["target"] is None else f"{result['target']:g}",
        )
        for result in results
    ]
    print_table(("case", "ours", "theirs", "unit", "rival", "ratio", "target"), rows)


def _coloured(ratio: float, target: float | None) -> Text:
    return Text(f"{ratio:.2f}", "" if target is None else "green" if ratio >= target else "red")
