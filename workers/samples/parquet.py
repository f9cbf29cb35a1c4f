"""Row groups of Parquet files as parts of a source: plain ones, or those of every level of sample trees."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from geartrain.ams.values.errors import SourceDamaged
from geartrain.ams.values.specs import Ids
from geartrain.workers.samples.columns import ColumnPlan, Fill, Hashed, joint_schema, planned_columns
from geartrain.workers.samples.rows import Rows, SampleRows
from geartrain.workers.samples.trees.layout import COUNTS, is_level, levels_in
from geartrain.workers.samples.urls import DataFile, Sources, find_files

SUFFIXES = (".parquet", ".pq")
_FOOTERS_AT_ONCE = 8
_MAX_WHOLE, _SLICE_ROWS, _BUFFER_BYTES = 131_072, 65_536, 1 << 20
"""Largest row group that is read whole; of larger ones, rows, and bytes of a column, that are read at once."""
_NAME = re.compile(r"(.+)\.[\w-]+\.parquet")
_PLAIN = ("",)
"""Levels of files that are no trees."""


class _Level(NamedTuple):
    """Table of one level in one set of files."""

    file: DataFile
    footer: Any


class ParquetRows:
    """Row groups of Parquet files, a :class:`~geartrain.workers.samples.source.SampleSource`. Opening reads the
    footers."""

    def __init__(self, where: Sources, *, trees: bool | None = None) -> None:
        """``trees``: whether the files are levels of sample trees; None: as the first one is."""
        files = find_files(where, SUFFIXES)
        footers = _footers_of(files)
        self._schemas = schemas = {
            file.name: footer.schema.to_arrow_schema() for file, footer in zip(files, footers, strict=True)
        }
        first = files[0].name
        self.is_tree = is_level(schemas[first]) if trees is None else trees
        self._place = first.rpartition("/")[0] if self.is_tree else first
        self.levels = levels_in(schemas[first], first)[0] if self.is_tree else _PLAIN
        self._sets = (
            _sets(files, footers, schemas, self.levels)
            if self.is_tree
            else [{"": _Level(file, footer)} for file, footer in zip(files, footers, strict=True)]
        )
        joint = {
            level: joint_schema([schemas[file_set[level].file.name] for file_set in self._sets])
            for level in self.levels
        }
        self._own = {level: [name for name in joint[level].names if self._is_column(name)] for level in self.levels}
        self.schema = pa.schema([field for of in joint.values() for field in of if self._is_column(field.name)])
        of_first = [name for found in self._sets[0].values() for name in schemas[found.file.name].names]
        self.columns = [name for name in of_first if self._is_column(name)]
        self._groups = [
            (file_set, group)
            for file_set in self._sets
            for group in range(file_set[self.levels[-1]].footer.num_row_groups)
        ]
        self.part_rows = [found[self.levels[-1]].footer.row_group(group).num_rows for found, group in self._groups]

    def _is_column(self, name: str) -> bool:
        return not self.is_tree or name != COUNTS

    def plan(
        self,
        columns: Sequence[str] | Mapping[str, str] | None,
        hash_strings: Hashed,
        fill: Fill,
        fold: Collection[str] = (),
    ) -> Self:
        """Set the columns to read, as in ``gt.ParquetSamples``. Raises InvalidArgument, ColumnMismatch."""
        columns = self.columns if columns is None else columns  # further columns of later files are ignored
        is_said = isinstance(columns, Mapping)
        plan = planned_columns(columns, self.schema, self._place, hash_strings, fill, fold)
        self.types = plan.types
        self._plans = {level: _part_of(plan, self._own[level]) for level in self.levels}
        for file_set in self._sets:
            for level, found in file_set.items():
                schema, name = self._schemas[found.file.name], found.file.name
                said_by = "columns" if is_said else next(iter(self._schemas))
                self._plans[level].require_in(schema, name, said_by, is_said=is_said)
        return self

    @property
    def identity(self) -> Any:
        """Names and row counts of the files."""
        return [
            [level.file.inner_name, level.footer.num_rows] for file_set in self._sets for level in file_set.values()
        ]

    def read(self, part: int) -> Rows:
        """Read a row group. Raises SourceDamaged."""
        file_set, group = self._groups[part]
        if not self.is_tree and self.part_rows[part] > _MAX_WHOLE:
            return _LargeGroup(file_set[""], group, self._plans[""])
        *outer_levels, last = self.levels
        outer: dict[str, tuple[Any, Ids]] = {}
        parents: Ids | None = None
        """Row of the parent of each node of the level that is read."""
        for level in self.levels:
            found, plan = file_set[level], self._plans[level]
            names = [*plan.types] if level == last else [*plan.types, COUNTS]
            table = _read_group(found, group, names, plan)
            num_nodes = found.footer.row_group(group).num_rows
            if parents is not None and len(parents) != num_nodes:
                raise SourceDamaged(
                    f"{found.file.name}: row group {group} has {num_nodes} nodes, those of the level before have "
                    f"{len(parents)} children; the files do not belong together"
                )
            if parents is not None:  # the outer levels' values of these nodes
                outer = {name: (nodes, places[parents]) for name, (nodes, places) in outer.items()}
            samples = plan.apply(table, partial(_row_name, found, group, 0))
            if level in outer_levels:
                outer[level] = samples, np.arange(num_nodes)
                parents = np.repeat(np.arange(num_nodes), table.column(COUNTS).to_numpy())
        return SampleRows(samples, num_nodes, outer)

    def name_row(self, part: int, row: int) -> str:
        """Return file and row of a sample of a part, in words."""
        file_set, group = self._groups[part]
        return _row_name(file_set[self.levels[-1]], group, 0, row)


class _LargeGroup:
    """A large row group of plain samples, of which one slice at a time is in memory. It is read from front to back: a
    slice before the last one is read from the front again.
    """

    def __init__(self, level: _Level, group: int, plan: ColumnPlan) -> None:
        self._level, self._group, self._plan = level, group, plan
        self.num_rows = level.footer.row_group(group).num_rows
        self._at = self.num_rows
        """Row of the group at which :attr:`_rest` begins."""
        self._rest: Any = None
        self._tables: Iterator[Any] = iter(())

    def slice(self, first: int, count: int) -> SampleRows:
        """Return at most ``count`` rows from ``first`` on. Raises SourceDamaged."""
        end = min(self.num_rows, first + count)
        try:
            table = self._table(first, end)
        except BaseException:  # the partial read is of no use: the next slice is read from the front
            self._at, self._rest, self._tables = self.num_rows, None, iter(())
            raise
        return SampleRows(self._plan.apply(table, partial(_row_name, self._level, self._group, first)), end - first)

    def _table(self, first: int, end: int) -> Any:
        if first < self._at or self._rest is None:
            self._tables = self._read()
            self._at, self._rest = 0, self._next_table()
        while self._at + self._rest.num_rows < end:
            passed = min(max(0, first - self._at), self._rest.num_rows)
            self._at, self._rest = self._at + passed, pa.concat_tables([self._rest.slice(passed), self._next_table()])
        table = self._rest.slice(first - self._at, end - first)
        self._at, self._rest = end, self._rest.slice(end - self._at)
        return table

    def _next_table(self) -> Any:
        table = next(self._tables, None)
        if table is None:
            raise SourceDamaged(
                f"{self._level.file.name}: row group {self._group} ends before its {self.num_rows} rows; write the "
                "file again"
            )
        return table

    def _read(self) -> Iterator[Any]:
        file, footer = self._level
        with _damage_of(self._level, self._group), file.open() as opened:
            batches = pq.ParquetFile(
                opened, metadata=footer, buffer_size=_BUFFER_BYTES, read_dictionary=_texts(footer, self._plan)
            ).iter_batches(_SLICE_ROWS, row_groups=[self._group], columns=[*self._plan.types])
            yield from (pa.Table.from_batches([batch]) for batch in batches)


def _row_name(level: _Level, group: int, first: int, row: int) -> str:
    before = sum(level.footer.row_group(before).num_rows for before in range(group))
    return f"{level.file.name}, row {before + first + row}"


def _part_of(plan: ColumnPlan, columns: Sequence[str]) -> ColumnPlan:
    return replace(plan, types={name: kind for name, kind in plan.types.items() if name in columns})


def _sets(
    files: Sequence[DataFile], footers: Sequence[Any], schemas: Mapping[str, Any], levels: tuple[str, ...]
) -> list[dict[str, _Level]]:
    """Return the files of each set by level. Raises SourceDamaged for an incomplete set."""
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


def _read_group(level: _Level, group: int, columns: list[str], plan: ColumnPlan) -> Any:
    """Read a row group as a table; texts to be hashed come as dictionary codes, so that each word is hashed once.
    Raises SourceDamaged.
    """
    file, footer = level
    with _damage_of(level, group), file.open() as opened:
        parquet = pq.ParquetFile(opened, metadata=footer, pre_buffer=True, read_dictionary=_texts(footer, plan))
        return parquet.read_row_group(group, columns=columns)


def _texts(footer: Any, plan: ColumnPlan) -> list[str]:
    """Return the paths, in the file, of columns of texts to be hashed, and of lists of them."""
    paths = [footer.schema.column(place).path for place in range(len(footer.schema))]
    return [path for path in paths if path.partition(".")[0] in plan.seeds]


@contextmanager
def _damage_of(level: _Level, group: int) -> Iterator[None]:
    """Convert errors of reading a row group to SourceDamaged."""
    file, footer = level
    try:
        yield
    except (pa.ArrowException, OSError) as exc:
        first = sum(footer.row_group(before).num_rows for before in range(group))
        last = first + footer.row_group(group).num_rows - 1
        raise SourceDamaged(f"{file.name}: row group {group} (rows {first} to {last}) cannot be read: {exc}") from exc


def _footers_of(files: Sequence[DataFile]) -> list[Any]:
    with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
        return list(pool.map(_footer_of, files))


def _footer_of(file: DataFile) -> Any:
    """Return the footer of a file. Raises SourceDamaged."""
    try:
        with file.open() as opened:
            return pq.read_metadata(opened)
    except (pa.ArrowException, OSError) as exc:
        raise SourceDamaged(
            f"{file.name} is no whole Parquet file ({exc}): it was cut off, or is of another kind. Write it again, or "
            "take it out of the folder"
        ) from exc
