"""Registry of row backends, by the names for ``rows=`` of a head, recipes and command lines."""

from __future__ import annotations

from geartrain.ams.values.errors import InvalidArgument
from geartrain.bridge.head.backends.backend import RowBackend
from geartrain.bridge.head.backends.hosted.hosted_backend import HostedBackend
from geartrain.bridge.head.backends.pull.pull_backend import PullBackend
from geartrain.bridge.head.backends.ranks.rank_backend import RankBackend

ROW_BACKENDS: dict[str, type[RowBackend]] = {"pull": PullBackend, "hosted": HostedBackend, "ranks": RankBackend}
"""Kinds of row backends; one of your own may be added."""


def backend_named(rows: str) -> type[RowBackend]:
    """Return the backend of this name. Raises InvalidArgument."""
    if not isinstance(rows, str) or rows not in ROW_BACKENDS:
        known = ", ".join(f"{name!r} ({backend.summary})" for name, backend in ROW_BACKENDS.items())
        raise InvalidArgument(f"rows is {rows!r}; it must be one of {known}")
    return ROW_BACKENDS[rows]
