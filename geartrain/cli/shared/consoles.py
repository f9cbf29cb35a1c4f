"""Tables on standard output, and progress bars on standard error."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from rich.table import Table

HEALTH_COLOURS = {"ready": "green", "degraded": "yellow", "not ready": "red"}
"""Terminal colour of each result of ``health_of``."""
_PIPED_WIDTH = 400
_NUMBER = re.compile(r"[\d,]*(\.\d+)?( (bytes|[KMGT]iB|s|min|h|days|%)( .*)?)?")


def plain_console(**settings: Any) -> Console:
    """Return a console that prints text as it is: a name such as ``user[red]`` or ``:100:`` is no markup."""
    return Console(markup=False, emoji=False, highlight=False, **settings)


def table_console() -> Console:
    """Return a console of stdout; where stdout is no terminal it is so wide that no cell wraps, for programs to
    parse."""
    breaks_at_window = sys.stdout.isatty() or "COLUMNS" in os.environ
    return plain_console(width=None if breaks_at_window else _PIPED_WIDTH)


def table_of(headers: Sequence[str], rows: Iterable[Sequence[str | Text]], *, expand: bool = False) -> Table:
    """Return a table with right-aligned numbers, which wraps long cells at the window; ``expand``: as wide as that."""
    from rich.table import Table

    rows = list(rows)
    table = Table(expand=expand)
    for place, header in enumerate(headers):
        is_number = bool(rows) and all(_NUMBER.fullmatch(str(row[place])) for row in rows)
        table.add_column(header, overflow="fold", justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def print_table(headers: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
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

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    left = (TextColumn("left"), TimeRemainingColumn())
    with Progress(*columns, *left, console=plain_console(stderr=True), disable=quiet) as bar:
        line = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(line, completed=done, total=total or None)
