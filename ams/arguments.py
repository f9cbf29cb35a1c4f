"""Checks of single arguments, whose errors name argument and value."""

from __future__ import annotations

import operator
from numbers import Real

from geartrain.ams.errors import InvalidArgument
from geartrain.ams.words import quoted


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


def real_number(name: str, value: object) -> float:
    """Return ``value``, of any real type but bool, as a float; it may be infinite. Raises InvalidArgument."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidArgument(f"{name} is {quoted(value)}; it must be a number")
    return float(value)
