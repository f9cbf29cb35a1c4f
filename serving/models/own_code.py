"""User code that a service may run: it must be named at its start, not only in a model's folder."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from geartrain.ams.values.errors import ConfigError

_TRUSTED: set[str] = set()
"""``package.module:function`` that may run in this process."""


def trust(name: str | None) -> None:
    """Allow models that name this code to run it; None: nothing."""
    if name is not None:
        _TRUSTED.add(name)


def function_of(name: str, whose: str) -> Callable[[list[Any]], Any]:
    """Return the function that the folder ``whose`` names. Raises ConfigError: not trusted, or not importable."""
    if name not in _TRUSTED:
        raise ConfigError(
            f"{whose} makes its tensors by {name}, which is code of your own. It runs only if you name it: "
            f"geartrain serve --preprocessing {name}, or geartrain.serve_app(..., preprocessing={name!r})"
        )
    module, _, function = name.partition(":")
    try:
        found: Callable[[list[Any]], Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as exc:
        raise ConfigError(
            f"the preprocessing {name!r} cannot be imported: {exc}; give package.module:function, and put its folder "
            "on PYTHONPATH"
        ) from exc
    return found
