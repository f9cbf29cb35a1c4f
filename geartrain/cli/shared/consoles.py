"""Where tables are printed."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_PIPED_WIDTH = 400


def table_console() -> Console:
    """Standard output; so wide that no cell is broken where it is no terminal, for what reads it then reads lines."""
    breaks_at_window = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console() if breaks_at_window else Console(width=_PIPED_WIDTH)
