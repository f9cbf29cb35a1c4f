"""The places where the rows of a group may lie, by the names of ``rows=``."""

from __future__ import annotations

from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.bridge.embedding.cluster_fields import ClusterFields
from geartrain.bridge.embedding.group_rows import GroupRows
from geartrain.bridge.embedding.rank_fields import RankFields

GROUP_ROWS: dict[str, type[GroupRows]] = {"pull": ClusterFields, "ranks": RankFields}
"""One of your own may be put in beside these."""


def group_rows_named(rows: str) -> type[GroupRows]:
    """Raises InvalidArgument."""
    if not isinstance(rows, str) or rows not in GROUP_ROWS:
        known = ", ".join(f"{name!r} ({row.summary})" for name, row in GROUP_ROWS.items())
        raise InvalidArgument(f"rows is {quoted(rows)}; it must be one of {known}")
    return GROUP_ROWS[rows]
