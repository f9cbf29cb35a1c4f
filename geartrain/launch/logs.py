"""Logging to stderr, coloured on a terminal, so that stdout carries only what a command prints."""

from __future__ import annotations

import logging
import os
import sys
from datetime import datetime
from logging.handlers import WatchedFileHandler

from geartrain.ams.values.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
_COLOURS = {"DEBUG": "2", "WARNING": "33", "ERROR": "31", "CRITICAL": "31"}
"""Level -> how a terminal shows it: faint, yellow, red."""


def log_to_stderr(level: str) -> None:
    """Send every log record of at least ``level`` to stderr. Raises ConfigError for an unknown level."""
    if level not in LEVELS:
        raise ConfigError(f"log level {level!r} is none of {', '.join(LEVELS)}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def audit_to(file: str | None) -> None:
    """Add the lines of the audit to ``file``, and no more to the log; None: leave them there. Raises ConfigError."""
    if file is None:
        return
    try:
        handler = WatchedFileHandler(file)  # one that was moved away is begun anew
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
        """ISO 8601 with the zone, as other programs read it."""
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
