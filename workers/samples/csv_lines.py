"""Blocks of lines of CSV files as parts of a source."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import InvalidArgument, SourceDamaged
from geartrain.ams.values.text import quoted
from geartrain.workers.samples.columns import ColumnPlan, Hashed, missing_column, planned_columns, type_named
from geartrain.workers.samples.rows import SampleRows
from geartrain.workers.samples.urls import DataFile, Sources, find_files

SUFFIXES = (".csv", ".tsv")
_GZIP = b"\x1f\x8b"
_BLANK = re.compile(rb"^\r?\n", re.MULTILINE)


class _Block(NamedTuple):
    file: int
    begin: int
    """Bytes before it."""
    num_bytes: int
    first_line: int
    """From 1, as editors count."""


class CsvRows:
    """A :class:`~geartrain.workers.samples.source.SampleSource`. Opening it reads every file once, to count its lines.

    A row is a line: quoted values hold no line breaks.
    """

    def __init__(
        self,
        where: Sources,
        *,
        columns: Sequence[str] | Mapping[str, str] | None,
        hash_strings: Hashed,
        fill: Mapping[str, float],
        delimiter: str,
        list_delimiter: str,
        names: Sequence[str] | None,
        block_bytes: int,
    ) -> None:
        for what, sign in (("delimiter", delimiter), ("list_delimiter", list_delimiter)):
            if not isinstance(sign, str) or len(sign) != 1 or not sign.isascii():
                raise InvalidArgument(f"{what} is {quoted(sign)}; it must be one ASCII character")
        self._delimiter, self._list_delimiter = delimiter, list_delimiter
        self._block_bytes = integer("block_bytes", block_bytes, 1)
        self._files = find_files(where, SUFFIXES)
        self._names: list[list[str]] = []
        self._blocks: list[_Block] = []
        self.part_rows: list[int] = []
        for place, file in enumerate(self._files):
            self._scan(place, file, names)
        if columns is not None and not isinstance(columns, str):
            for file, own in zip(self._files, self._names, strict=True):
                for name in columns:
                    if name not in own:
                        raise missing_column(name, own, file.name)
        self._plan = self._planned(columns, hash_strings, fill)
        for file, own in zip(self._files, self._names, strict=True):
            for name in self._plan.types:
                if name not in own:
                    raise missing_column(name, own, file.name)

    @property
    def identity(self) -> Any:
        """See SampleSource."""
        return [[file.inner_name, file.num_bytes] for file in self._files]

    def _scan(self, place: int, file: DataFile, names: Sequence[str] | None) -> None:
        """Find the blocks of a file: whole lines, at least ``block_bytes`` of them but for the last."""
        with file.open() as opened:
            line, begin = 1, 0
            if opened.read(len(_GZIP)) == _GZIP:
                raise SourceDamaged(f"{file.name} is compressed; a CSV is read from the middle, so unpack it first")
            opened.seek(0)
            if names is None:
                header = opened.readline()
                line, begin = 2, len(header)
                self._names.append(self._header(header, file))
            else:
                self._names.append(list(names))
            while block := opened.read(self._block_bytes):
                block += opened.readline()
                lines = block.count(b"\n") + (not block.endswith(b"\n"))
                blank = len(_BLANK.findall(block))
                if lines > blank:
                    self._blocks.append(_Block(place, begin, len(block), line))
                    self.part_rows.append(lines - blank)
                line, begin = line + lines, begin + len(block)

    def _header(self, header: bytes, file: DataFile) -> list[str]:
        try:
            table = csv.read_csv(
                io.BytesIO(header.removeprefix(b"\xef\xbb\xbf")),
                parse_options=csv.ParseOptions(delimiter=self._delimiter),
            )
        except pa.ArrowInvalid as exc:
            raise SourceDamaged(f"{file.name}, line 1: it must name the columns: {exc}") from exc
        return list(table.column_names)

    def _planned(self, columns: Any, hash_strings: Any, fill: Mapping[str, float]) -> ColumnPlan:
        """Types that nobody said are those of the first block: integers, floats, bools, else strings."""
        first = self._files[0].name
        known = [name for name in (self._names[0] if columns is None else columns) if name in self._names[0]]
        said = dict(columns) if isinstance(columns, Mapping) else {}
        guessed = pa.schema([])
        if self._blocks and not said:
            guessed = self._parse(0, known, {}).schema
        fields = [
            (name, type_named(name, said[name]).arrow if name in said else _type_in(guessed, name)) for name in known
        ]
        return planned_columns(columns, pa.schema(fields), first, hash_strings, fill)

    def read(self, part: int) -> SampleRows:
        """See SampleSource. Raises SourceDamaged."""
        types = {name: _parsed_as(kind) for name, kind in self._plan.types.items()}
        table = self._parse(part, list(types), types)
        if table.num_rows != self.part_rows[part]:
            raise SourceDamaged(
                f"{self._name_row(part, 0)}: {self.part_rows[part]} lines hold {table.num_rows} rows; "
                "line breaks inside quotes are not read, and the file must not change"
            )
        for name, kind in self._plan.types.items():
            if kind.is_list:
                place = table.column_names.index(name)
                table = table.set_column(place, name, self._split(table.column(name)))
        samples = self._plan.apply(table, lambda row: self._name_row(part, row))
        return SampleRows(samples, self.part_rows[part])

    def _parse(self, part: int, names: list[str], types: Mapping[str, Any]) -> Any:
        block = self._blocks[part]
        bad: list[Any] = []

        def note(row: Any) -> str:
            bad.append(row)
            return "error"

        content = self._content(block)
        try:
            return csv.read_csv(
                io.BytesIO(content),
                read_options=csv.ReadOptions(
                    column_names=self._names[block.file], use_threads=False, block_size=len(content) + 1
                ),
                parse_options=csv.ParseOptions(delimiter=self._delimiter, invalid_row_handler=note),
                convert_options=csv.ConvertOptions(include_columns=names, column_types=dict(types)),
            )
        except pa.ArrowInvalid as exc:
            if bad:
                row = bad[0]
                raise SourceDamaged(
                    f"{self._name_row(part, row.number - 1)}: {row.actual_columns} columns, where there must be "
                    f"{row.expected_columns}: {quoted(row.text)}"
                ) from exc
            raise self._bad_value(part, content, types, exc) from exc

    def _content(self, block: _Block) -> bytes:
        with self._files[block.file].open() as opened:
            opened.seek(block.begin)
            return bytes(opened.read(block.num_bytes))

    def _bad_value(self, part: int, content: bytes, types: Mapping[str, Any], exc: Exception) -> SourceDamaged:
        """Find the row of a value that is not of its column's type: the words of the parser do not name it."""
        block = self._blocks[part]
        for number, line in enumerate(text for text in content.splitlines(keepends=True) if text.strip(b"\r\n")):
            for name, kind in types.items():
                try:
                    csv.read_csv(
                        io.BytesIO(line),
                        read_options=csv.ReadOptions(column_names=self._names[block.file], use_threads=False),
                        parse_options=csv.ParseOptions(delimiter=self._delimiter),
                        convert_options=csv.ConvertOptions(include_columns=[name], column_types={name: kind}),
                    )
                except pa.ArrowInvalid as reason:
                    return SourceDamaged(
                        f"{self._name_row(part, number)}: column {name!r} is no {kind}: {quoted(str(reason))}"
                    )
        return SourceDamaged(f"{self._name_row(part, 0)} or below: {exc}")

    def _name_row(self, part: int, row: int) -> str:
        """Of a row of a block, the line; blank ones count."""
        block = self._blocks[part]
        lines = self._content(block).splitlines()
        line = [number for number, text in enumerate(lines) if text][row]
        return f"{self._files[block.file].name}, line {block.first_line + line}"

    def _split(self, column: Any) -> Any:
        """The lists that texts are, separated by the delimiter of lists; an empty text is an empty list."""
        return pc.split_pattern(pc.if_else(pc.equal(column, ""), None, column), self._list_delimiter)


def _type_in(schema: Any, name: str) -> Any:
    arrow = schema.field(name).type if name in schema.names else pa.string()
    return pa.string() if pa.types.is_null(arrow) else arrow


def _parsed_as(kind: Any) -> Any:
    return pa.string() if kind.is_list else kind.arrow
