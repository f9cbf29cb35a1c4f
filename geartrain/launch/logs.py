"""Logging to stderr, coloured on a terminal; stdout carries only a command's output."""

from __future__ import annotations

import logging
import os
import sys
from datetime import datetime
from logging.handlers import WatchedFileHandler

from geartrain.ams.values.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
_COLOURS = {"DEBUG": "2", "WARNING": "33", "ERROR": "31", "CRITICAL": "31"}
"""Terminal colour by level: faint, yellow, red."""


def log_to_stderr(level: str) -> None:
    """Send every log record of at least ``level`` to stderr. Raises ConfigError for an unknown level."""
    if level not in LEVELS:
        raise ConfigError(f"log level {level!r} is none of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def audit_to(file: str | None) -> None:
    """Write audit lines to ``file`` instead of the log; None: leave them in the log. Raises ConfigError."""
    if file is None:
        return
    try:
        handler = WatchedFileHandler(file)  # reopens a file that was rotated
    except OSError as exc:
        raise ConfigError(f"security.audit is {file!r}, which cannot be written: {exc.strerror}") from exc
    auditor = logging.getLogger("geartrain.audit")
    auditor.addHandler(handler)
    auditor.setLevel(logging.INFO)
    auditor.propagate = False


class _Lines(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        line, colour = super().formatMessage(record), _COLOURS.get(record.levelname)
        is_coloured = colour and sys.stderr.isatty() and not os.environ.get("NO_COLOR")
        return f"\x1b[{colour}m{line}\x1b[0m" if is_coloured else line

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002, N802
        """Return the time in ISO 8601 with the zone, for other programs to parse."""
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
