"""Conversion of plain samples to prefix trees: neighbours with equal values of a level share a node of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from geartrain.ams.values.errors import ColumnMismatch, InvalidArgument
from geartrain.ams.values.text import quoted
from geartrain.workers.atomic import replacing_folder
from geartrain.workers.samples.columns import require_column
from geartrain.workers.samples.dedup import Mask, changes
from geartrain.workers.samples.trees.layout import COUNTS, file_name, with_levels

_GROUPS_OF_PART = 64
ReadAll = Callable[[], Iterator[Any]]
"""Function that yields all samples in order, anew at each call."""


@dataclass(frozen=True, kw_only=True)
class TreeReport:
    """Nodes and columns of written trees."""

    num_samples: int
    nodes: Mapping[str, int]
    """Number of nodes of each level."""
    columns: Mapping[str, tuple[str, ...]]
    """Columns of each level."""
    num_bytes: int


def write_trees(
    tables: ReadAll, out: Path, levels: Mapping[str, Sequence[str]], *, rows_per_group: int, compression: str
) -> TreeReport:
    """Write the samples of ``tables`` as trees into the new folder ``out``, atomically.

    A column that ``levels`` does not name goes to the outermost level in which it is constant within a node. Raises
    InvalidArgument, ColumnMismatch, and the errors of ``tables``.
    """
    if out.exists() and any(out.iterdir()):
        raise InvalidArgument(f"{out} is not empty; give a new folder")
    columns = _placed(tables, levels)
    with replacing_folder(out) as partial:
        return _write(tables, partial, columns, rows_per_group, compression)


def _placed(tables: ReadAll, levels: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return the columns of each level."""
    names = list(levels)
    rest: dict[str, int] = {}
    """Outermost possible level of each column that is not named."""
    placed: dict[str, list[str]] = {}
    last: Any = None
    for table in tables():
        if last is None:
            placed = _named(table.column_names, levels)
            said = {column for own in placed.values() for column in own}
            rest = dict.fromkeys((name for name in table.column_names if name not in said), 0)
        elif not any(level < len(names) - 1 for level in rest.values()):
            break
        joined = table if last is None else pa.concat_tables([last, table])
        starts = _starts(joined, placed)
        for column, level in rest.items():
            if level < len(names) - 1:
                changed = changes(joined.column(column))
                while level < len(names) - 1 and (changed & ~starts[level]).any():
                    level += 1
                rest[column] = level
        last = joined.slice(max(0, joined.num_rows - 1))
    for column, level in rest.items():
        placed[names[level]].append(column)
    if not placed or not placed[names[-1]]:
        raise InvalidArgument(f"the last level, {names[-1]!r}, has no column; name a column that differs by sample")
    return placed


def _named(columns: Sequence[str], levels: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    seen: dict[str, str] = {}
    for level, own in levels.items():
        for column in own:
            require_column(column, columns, "the source")
            if column in seen:
                raise InvalidArgument(f"column {column!r} is in levels {seen[column]!r} and {level!r}; give it one")
            seen[column] = level
    if COUNTS in columns:
        raise ColumnMismatch(f"the source has a column {COUNTS!r}, which trees have for themselves; rename it")
    return {level: list(own) for level, own in levels.items()}


def _starts(table: Any, columns: Mapping[str, Sequence[str]]) -> list[Mask]:
    """Return, for each level, whether a node begins at a row; in the last one every row is a node."""
    found: list[Mask] = []
    so_far = np.zeros(table.num_rows, np.bool_)
    so_far[:1] = True
    for own in columns.values():
        for column in own:
            so_far = so_far | changes(table.column(column))
        found.append(so_far)
    found[-1] = np.ones(table.num_rows, np.bool_)
    return found


def _write(
    tables: ReadAll, folder: Path, columns: Mapping[str, Sequence[str]], rows_per_group: int, compression: str
) -> TreeReport:
    levels, nodes, num_samples, groups = list(columns), dict.fromkeys(columns, 0), 0, 0
    writers: dict[str, Any] = {}
    with ExitStack() as stack:
        for group in _groups(tables(), rows_per_group):
            if groups % _GROUPS_OF_PART == 0:
                stack.close()
                writers.clear()
            for level, table in _level_tables(group, columns).items():
                if level not in writers:
                    path = folder / file_name(groups // _GROUPS_OF_PART, level)
                    schema = with_levels(table.schema, levels, level)
                    writers[level] = stack.enter_context(pq.ParquetWriter(path, schema, compression=compression))
                table = table.replace_schema_metadata(writers[level].schema.metadata)
                writers[level].write_table(table, row_group_size=table.num_rows)
                nodes[level] += table.num_rows
            num_samples += group.num_rows
            groups += 1
    return TreeReport(
        num_samples=num_samples,
        nodes=nodes,
        columns={level: tuple(own) for level, own in columns.items()},
        num_bytes=sum(path.stat().st_size for path in folder.iterdir()),
    )


def _level_tables(group: Any, columns: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    starts = [np.flatnonzero(mask) for mask in _starts(group, columns)]
    tables: dict[str, Any] = {}
    for number, (level, own) in enumerate(columns.items()):
        table = group.select(list(own)).take(pa.array(starts[number]))
        if number < len(starts) - 1:
            inner = starts[number + 1]
            counts = np.diff(np.append(np.searchsorted(inner, starts[number]), len(inner)))
            table = table.append_column(COUNTS, pa.array(counts.astype(np.int32)))
        tables[level] = table
    return tables


def _groups(tables: Iterator[Any], rows_per_group: int) -> Iterator[Any]:
    """Yield the same samples in groups of ``rows_per_group``."""
    waiting: list[Any] = []
    count = 0
    for table in tables:
        waiting.append(table)
        count += table.num_rows
        while count >= rows_per_group:
            joined = pa.concat_tables(waiting)
            yield joined.slice(0, rows_per_group).combine_chunks()
            waiting, count = [joined.slice(rows_per_group)], count - rows_per_group
    if count:
        yield pa.concat_tables(waiting).combine_chunks()


def levels_named(levels: Sequence[str] | Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return levels with the columns that distinguish their nodes; a name alone stands for the column of that name.

    Raises InvalidArgument.
    """
    if isinstance(levels, str):
        raise InvalidArgument(f"levels is {quoted(levels)}; give a list of columns, or a mapping to lists of columns")
    given = dict(levels) if isinstance(levels, Mapping) else {name: (name,) for name in levels}
    if len(given) < 2 or (not isinstance(levels, Mapping) and len(given) < len(levels)):
        raise InvalidArgument(
            f"levels are {quoted(levels)}; at least two different ones are needed, the outermost first"
        )
    for name, own in given.items():
        if not isinstance(name, str) or not name.replace("_", "a").replace("-", "a").isalnum() or isinstance(own, str):
            raise InvalidArgument(
                f"level {quoted(name)} has columns {quoted(own)}; names of levels are of letters, digits, _ and -, and "
                "have a list of columns"
            )
    return {name: tuple(own) for name, own in given.items()}
