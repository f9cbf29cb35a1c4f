"""Where log lines go: stderr, coloured on a terminal, so that stdout carries only what a command prints."""

from __future__ import annotations

import logging
import sys
from datetime import datetime
from logging.handlers import WatchedFileHandler

from geartrain.ams.values.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")


def log_to_stderr(level: str) -> None:
    """Send every log record of at least ``level`` to stderr. Raises ConfigError for an unknown level."""
    if level not in LEVELS:
        raise ConfigError(f"log level {level!r} is none of {', '.join(LEVELS)}")
    logging.basicConfig(level=level.upper(), handlers=[_handler()], force=True)


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


def _handler() -> logging.Handler:
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.logging import RichHandler

        handler: logging.Handler = RichHandler(console=Console(stderr=True), show_path=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
        return handler
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    return handler


class _Lines(logging.Formatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: ARG002, N802
        """ISO 8601 with the zone, as other programs read it."""
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")
