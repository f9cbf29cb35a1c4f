"""Tables on standard output, and progress bars on standard error."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from rich.table import Table

HEALTH_COLOURS = {"ready": "green", "degraded": "yellow", "not ready": "red"}
"""Terminal colour of each result of ``health_of``."""
_PIPED_WIDTH = 400
_NUMBER = re.compile(r"[\d,]*(\.\d+)?( (bytes|[KMGT]iB|s|min|h|days|%)( .*)?)?")


def table_console() -> Console:
    """Return a console of stdout; where stdout is no terminal it is so wide that no cell wraps, for programs to
    parse."""
    breaks_at_window = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console() if breaks_at_window else Console(width=_PIPED_WIDTH)


def table_of(headers: Sequence[str], rows: Iterable[Sequence[str]], *, expand: bool = False) -> Table:
    """Return a table with right-aligned numbers, which wraps long cells at the window; ``expand``: as wide as that."""
    from rich.table import Table

    rows = list(rows)
    table = Table(expand=expand)
    for place, header in enumerate(headers):
        is_number = bool(rows) and all(_NUMBER.fullmatch(row[place]) for row in rows)
        table.add_column(header, overflow="fold", justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*row)
    return table


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table_console().print(table_of(headers, rows))


@contextmanager
def progress_bar(what: str, *, quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr; yields a function to call with the amount done and the total."""
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    left = (TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, *left, console=Console(stderr=True), disable=quiet) as bar:
        line = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(line, completed=done, total=total or None)
