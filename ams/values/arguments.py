"""Checks of single arguments, whose errors name argument and value."""

from __future__ import annotations

import operator
import os
import time
from numbers import Real
from pathlib import Path

import numpy as np

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted

MAX_NAME = 200
"""Characters of the name of a stream, job or worker."""
SECONDS_AHEAD = 3600.0
"""Seconds that the time in a push may be ahead of the receiver's clock."""


def integer(name: str, value: object, least: int, most: int | None = None) -> int:
    """Return ``value``, of any integer type but bool, as an int. Raises InvalidArgument unless least <= it <= most."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least or (most is not None and number > most):
        bounds = f">= {least}" if most is None else f"from {least} to {most}"
        raise InvalidArgument(f"{name} is {quoted(value)}; it must be an integer {bounds}")
    return number


def boolean(name: str, value: object) -> bool:
    """Return ``value``, True or False of Python or numpy, as a bool. Raises InvalidArgument."""
    if not isinstance(value, bool | np.bool_):
        raise InvalidArgument(f"{name} is {quoted(value)}; it must be True or False")
    return bool(value)


def path_name(name: str, value: object, what: str) -> str | Path:
    """Return ``value`` as a Path if it is one, else as text; ``what`` it must be. Raises InvalidArgument.

    ``~`` at its beginning is the user's folder, as in a shell.
    """
    if isinstance(value, Path):
        return Path(os.path.expanduser(value))  # noqa: PTH111 - Path.expanduser raises for users it does not know
    try:
        text = os.fspath(value)  # type: ignore[call-overload]
    except TypeError:
        text = ""
    if not isinstance(text, str) or not text:
        raise InvalidArgument(f"{name} is {quoted(value)}; it must be {what}")
    return os.path.expanduser(text)  # noqa: PTH111 - it may be a URL


def check_time(seconds: float, whose: str) -> None:
    """Raise InvalidArgument if the unix time of a push is more than SECONDS_AHEAD ahead of the local clock: it would
    make all rows of a table old at once, and for good. ``whose`` names the local clock in the error.
    """
    ahead = seconds - time.time()
    if ahead > SECONDS_AHEAD:
        raise InvalidArgument(
            f"unix_seconds is {seconds!r}, which is {ahead / 3600:.1f} hours ahead of the clock of {whose}; at most 1 "
            "is allowed. Give seconds as time.time() does, or set the clock of the worker's machine or the shard's"
        )


def real_number(name: str, value: object) -> float:
    """Return ``value``, of any real type but bool, as a float; it may be infinite. Raises InvalidArgument."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidArgument(f"{name} is {quoted(value)}; it must be a number")
    return float(value)


def checked_name(what: str, name: str) -> str:
    """Return the name of a stream, job or worker. Raises InvalidArgument."""
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME or not name.isprintable() or "" in name.split("/"):
        raise InvalidArgument(
            f"{what} is {quoted(name)}; it must have 1 … {MAX_NAME} printable characters in parts that '/' "
            "divides, for example 'job/rank0'"
        )
    return name
