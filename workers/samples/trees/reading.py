"""Files of sample trees as parts of a source: a row group of every level."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from geartrain.ams.values.errors import SourceDamaged
from geartrain.ams.values.specs import Ids
from geartrain.workers.samples.columns import ColumnPlan, Hashed, planned_columns
from geartrain.workers.samples.parquet import SUFFIXES, footer_of, read_group
from geartrain.workers.samples.trees.layout import COUNTS, levels_in
from geartrain.workers.samples.trees.rows import TreeRows
from geartrain.workers.samples.urls import DataFile, Where, find_files

_FOOTERS_AT_ONCE = 8
_NAME = re.compile(r"(.+)\.[\w-]+\.parquet")


class _Level(NamedTuple):
    """The table of one level in one set of files."""

    file: DataFile
    footer: Any


class TreeFiles:
    """A :class:`~geartrain.workers.samples.source.SampleSource`. Opening it reads the footer of every file."""

    def __init__(
        self,
        where: Where,
        *,
        columns: Sequence[str] | Mapping[str, str] | None,
        hash_strings: Hashed,
        fill: Mapping[str, float],
    ) -> None:
        files = find_files(where, SUFFIXES)
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
            footers = list(pool.map(footer_of, files))
        schemas = {file.name: footer.schema.to_arrow_schema() for file, footer in zip(files, footers, strict=True)}
        self.levels = levels_in(schemas[files[0].name], files[0].name)[0]
        self._sets: list[dict[str, _Level]] = _sets(files, footers, schemas, self.levels)
        first = self._sets[0]
        own = {
            level: [name for name in schemas[first[level].file.name].names if name != COUNTS] for level in self.levels
        }
        fields = [schemas[first[level].file.name].field(name) for level in self.levels for name in own[level]]
        place = files[0].name.rpartition("/")[0]
        plan = planned_columns(columns, pa.schema(fields), place, hash_strings, fill)
        self._plans = {level: _part_of(plan, own[level]) for level in self.levels}
        for file_set in self._sets:
            for level, found in file_set.items():
                said_by = "columns" if isinstance(columns, Mapping) else first[level].file.name
                self._plans[level].require_in(schemas[found.file.name], found.file.name, said_by)
        self._groups = [
            (number, group)
            for number, file_set in enumerate(self._sets)
            for group in range(file_set[self.levels[-1]].footer.num_row_groups)
        ]
        leaves = [self._sets[number][self.levels[-1]].footer.row_group(group) for number, group in self._groups]
        self.part_rows = [group.num_rows for group in leaves]

    @property
    def identity(self) -> Any:
        """See SampleSource."""
        return [
            [level.file.inner_name, level.footer.num_rows] for file_set in self._sets for level in file_set.values()
        ]

    def read(self, part: int) -> TreeRows:
        """See SampleSource. Raises SourceDamaged."""
        number, group = self._groups[part]
        tables: dict[str, Any] = {}
        places: dict[str, Ids] = {}
        parents: Ids | None = None
        """Of each node of the level that is read the row of its parent."""
        for level in self.levels:
            found, plan = self._sets[number][level], self._plans[level]
            is_last = level == self.levels[-1]
            names = [*plan.types] if is_last else [*plan.types, COUNTS]
            table = read_group(found.file, found.footer, group, names)
            num_nodes = found.footer.row_group(group).num_rows
            if parents is not None and len(parents) != num_nodes:
                raise SourceDamaged(
                    f"{found.file.name}: row group {group} has {num_nodes} nodes, those of the level before have "
                    f"{len(parents)} children; the files do not belong together"
                )
            if parents is not None:  # what the outer levels have of these nodes
                places = {outer: own[parents] for outer, own in places.items()}
            tables[level] = plan.apply(table, partial(_row_name, found, group))
            places[level] = np.arange(num_nodes)
            if not is_last:
                parents = np.repeat(places[level], table.column(COUNTS).to_numpy())
        leaves = tables.pop(self.levels[-1])
        num_rows = len(places.pop(self.levels[-1]))
        return TreeRows({level: (tables[level], places[level]) for level in tables}, leaves, num_rows)


def _row_name(level: _Level, group: int, row: int) -> str:
    first = sum(level.footer.row_group(before).num_rows for before in range(group))
    return f"{level.file.name}, row {first + row}"


def _part_of(plan: ColumnPlan, columns: Sequence[str]) -> ColumnPlan:
    return ColumnPlan(
        {name: plan.types[name] for name in plan.types if name in columns},
        {name: seed for name, seed in plan.seeds.items() if name in columns},
        {name: value for name, value in plan.fill.items() if name in columns},
    )


def _sets(
    files: Sequence[DataFile], footers: Sequence[Any], schemas: Mapping[str, Any], levels: tuple[str, ...]
) -> list[dict[str, _Level]]:
    """The files of each set by level. Raises SourceDamaged for one that is not whole."""
    found: dict[str, dict[str, _Level]] = {}
    for file, footer in zip(files, footers, strict=True):
        its_levels, level = levels_in(schemas[file.name], file.name)
        if its_levels != levels:
            raise SourceDamaged(
                f"{file.name} has levels {', '.join(its_levels)}; {files[0].name} has {', '.join(levels)}"
            )
        match = _NAME.fullmatch(PurePosixPath(file.inner_name).name)
        folder = file.inner_name.rpartition("/")[0]
        found.setdefault(f"{folder}/{match[1] if match else file.inner_name}", {})[level] = _Level(file, footer)
    for name, file_set in found.items():
        missing = [level for level in levels if level not in file_set]
        if missing:
            some = next(iter(file_set.values())).file.name
            raise SourceDamaged(f"{some} is there, and no file of level {missing[0]!r} beside it ({name.lstrip('/')})")
        counts = {level: file_set[level].footer.num_row_groups for level in levels}
        if len(set(counts.values())) > 1:
            raise SourceDamaged(
                f"the files of {name.lstrip('/')} have {counts} row groups; they do not belong together"
            )
    return [{level: file_set[level] for level in levels} for _, file_set in sorted(found.items())]
