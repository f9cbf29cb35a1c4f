"""File layout of sample trees: names and metadata. ``docs/explanation/sample-trees.md`` describes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from geartrain.ams.values.errors import SourceDamaged
from geartrain.ams.values.text import other_format

COUNTS = "num_children"
"""Column of every level but the last: the number of each node's children in the next level."""
_KEY = b"geartrain.sample_tree"
_FORMAT = 1


def file_name(part: int, level: str) -> str:
    """Return the file name of a level in a set."""
    return f"part-{part:05d}.{level}.parquet"


def with_levels(schema: Any, levels: Sequence[str], level: str) -> Any:
    """Return the schema of a level's table, with all levels and its own as metadata."""
    text = json.dumps({"format": _FORMAT, "levels": list(levels), "level": level})
    return schema.with_metadata({**(schema.metadata or {}), _KEY: text.encode()})


def is_level(schema: Any) -> bool:
    """Return whether the table is a level of sample trees."""
    return _KEY in (schema.metadata or {})


def levels_in(schema: Any, file: str) -> tuple[tuple[str, ...], str]:
    """Return all levels, and that of the table. Raises SourceDamaged for another kind of file or format."""
    text = (schema.metadata or {}).get(_KEY)
    if text is None:
        raise SourceDamaged(
            f"{file} is no level of sample trees; 'geartrain samples compress' makes them, gt.ParquetSamples reads "
            "plain Parquet"
        )
    try:
        said = json.loads(text)
        if said["format"] == _FORMAT and said["level"] in said["levels"]:
            return tuple(said["levels"]), said["level"]
        why = f"level {said['level']!r}" if said["format"] == _FORMAT else other_format(said["format"], _FORMAT)
    except (ValueError, KeyError, TypeError) as exc:
        why = repr(exc)
    raise SourceDamaged(f"{file} has sample trees that this version of Geartrain cannot read ({why})")
