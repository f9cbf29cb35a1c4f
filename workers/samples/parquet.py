"""Row groups of Parquet files as parts of a source."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from geartrain.ams.values.errors import SourceDamaged
from geartrain.workers.samples.columns import Hashed, planned_columns
from geartrain.workers.samples.flat_rows import FlatRows
from geartrain.workers.samples.urls import DataFile, Where, find_files

SUFFIXES = (".parquet", ".pq")
_FOOTERS_AT_ONCE = 8
logger = logging.getLogger(__name__)


class _Group(NamedTuple):
    file: int
    number: int
    first_row: int
    """In its file."""


class ParquetRows:
    """A :class:`~geartrain.workers.samples.source.SampleSource`. Opening it reads the footer of every file."""

    def __init__(
        self,
        where: Where,
        *,
        columns: Sequence[str] | Mapping[str, str] | None,
        hash_strings: Hashed,
        fill: Mapping[str, float],
    ) -> None:
        self._files = find_files(where, SUFFIXES)
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
            self._footers = list(pool.map(footer_of, self._files))
        schemas = [footer.schema.to_arrow_schema() for footer in self._footers]
        first = self._files[0].name
        self._plan = planned_columns(columns, schemas[0], first, hash_strings, fill)
        said_by = "columns" if isinstance(columns, Mapping) else first
        for file, schema in zip(self._files, schemas, strict=True):
            self._plan.require_in(schema, file.name, said_by)
        self._groups: list[_Group] = []
        self.part_rows: list[int] = []
        for place, footer in enumerate(self._footers):
            row = 0
            for number in range(footer.num_row_groups):
                self._groups.append(_Group(place, number, row))
                self.part_rows.append(footer.row_group(number).num_rows)
                row += self.part_rows[-1]

    @property
    def identity(self) -> Any:
        """See SampleSource."""
        return [[file.inner_name, footer.num_rows] for file, footer in zip(self._files, self._footers, strict=True)]

    def read(self, part: int) -> FlatRows:
        """See SampleSource. Raises SourceDamaged."""
        group = self._groups[part]
        file = self._files[group.file]
        table = read_group(file, self._footers[group.file], group.number, list(self._plan.types))
        return FlatRows(self._plan.apply(table, lambda row: f"{file.name}, row {group.first_row + row}"))


def read_group(file: DataFile, footer: Any, group: int, columns: list[str]) -> Any:
    """A row group as a table. Raises SourceDamaged."""
    try:
        with file.open() as opened:
            return pq.ParquetFile(opened, metadata=footer, pre_buffer=True).read_row_group(group, columns=columns)
    except (pa.ArrowException, OSError) as exc:
        first = sum(footer.row_group(before).num_rows for before in range(group))
        last = first + footer.row_group(group).num_rows - 1
        raise SourceDamaged(f"{file.name}: row group {group} (rows {first} to {last}) cannot be read: {exc}") from exc


def footer_of(file: DataFile) -> Any:
    """The footer of a file. Raises SourceDamaged."""
    try:
        with file.open() as opened:
            return pq.read_metadata(opened)
    except (pa.ArrowException, OSError) as exc:
        raise SourceDamaged(
            f"{file.name} is no whole Parquet file ({exc}): it was cut off, or is of another kind. Write it again, or "
            "take it out of the folder"
        ) from exc
