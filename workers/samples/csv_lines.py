"""Blocks of lines of CSV files as parts of a source."""

from __future__ import annotations

import io
import re
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from geartrain.ams.values.arguments import integer
from geartrain.ams.values.errors import InvalidArgument, SourceDamaged
from geartrain.ams.values.text import quoted
from geartrain.workers.samples.columns import (
    ANY_64_BITS,
    Fill,
    Hashed,
    joint_schema,
    planned_columns,
    says_fold,
    says_hash,
    says_type,
    type_named,
    type_of,
)
from geartrain.workers.samples.rows import SampleRows
from geartrain.workers.samples.urls import DataFile, Sources, find_files

SUFFIXES = (".csv", ".tsv")
_GZIP = b"\x1f\x8b"
BLOCK_BYTES = 4 << 20
_BLANK = re.compile(rb"^\r?\n", re.MULTILINE)


class _Block(NamedTuple):
    file: int
    begin: int
    """Bytes before the block."""
    num_bytes: int
    first_line: int
    """Number of its first line, from 1, as in editors."""


class CsvRows:
    """Lines of CSV files, a :class:`~geartrain.workers.samples.source.SampleSource`.

    A row is a line: quoted values hold no line breaks. Opening reads every file once, to count its lines.
    """

    def __init__(
        self,
        where: Sources,
        *,
        delimiter: str,
        list_delimiter: str,
        names: Sequence[str] | None = None,
        header: bool = False,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        """``names`` of the columns; None: the first line has them. ``header``: ``names`` replaces those of the first
        line."""
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
            self._scan(place, file, names, header)
        self.columns = self._names[0]
        self._guessed: dict[str, Any] = {}
        """Types of columns guessed from their values."""

    @property
    def identity(self) -> Any:
        """Names and sizes of the files."""
        return [[file.inner_name, file.num_bytes] for file in self._files]

    def _scan(self, place: int, file: DataFile, names: Sequence[str] | None, has_header: bool) -> None:
        """Find the blocks of a file: whole lines, at least ``block_bytes`` of them except in the last."""
        with file.open() as opened:
            line, begin = 1, 0
            if opened.read(len(_GZIP)) == _GZIP:
                raise SourceDamaged(f"{file.name} is compressed; a CSV is read from the middle, so unpack it first")
            opened.seek(0)
            if names is None or has_header:
                header = opened.readline()
                line, begin = 2, len(header)
            self._names.append(self._header(header, file) if names is None else list(names))
            while block := opened.read(self._block_bytes):
                block += opened.readline()
                lines = block.count(b"\n") + (not block.endswith(b"\n"))
                blank = len(_BLANK.findall(block))
                if lines > blank:
                    self._blocks.append(_Block(place, begin, len(block), line))
                    self.part_rows.append(lines - blank)
                line, begin = line + lines, begin + len(block)

    def _header(self, header: bytes, file: DataFile) -> list[str]:
        text = header.removeprefix(b"\xef\xbb\xbf")
        if not text.strip():
            what = "has a blank first line" if text else "is empty"
            raise SourceDamaged(f"{file.name} {what}; the first line must name the columns")
        try:
            table = csv.read_csv(
                io.BytesIO(text),
                parse_options=csv.ParseOptions(delimiter=self._delimiter),
            )
        except pa.ArrowInvalid as exc:
            raise SourceDamaged(f"{file.name}, line 1: it must name the columns: {exc}") from exc
        return list(table.column_names)

    @cached_property
    def schema(self) -> Any:
        """Types of all columns, from the first block with a value: integers, floats, bools, else texts."""
        return self._schema({}, self._all_names())

    def _all_names(self) -> list[str]:
        return list(joint_schema([pa.schema([(name, pa.null()) for name in own]) for own in self._names]).names)

    def _schema(self, said: Mapping[str, Any], wanted: Collection[str]) -> Any:
        names, types = self._all_names(), dict(said)
        guessed = {name for name in names if name in wanted and names.count(name) == 1 and name not in types}
        for part in range(len(self._blocks)):
            if unknown := [name for name in names if name in guessed and name not in types]:
                found = self._parse(part, unknown, {}).schema
                types |= {field.name: _guess(field.type) for field in found if not pa.types.is_null(field.type)}
        self._guessed |= {name: types[name] for name in guessed if name in types}
        return pa.schema([(name, types.get(name, pa.null())) for name in names])

    def plan(
        self,
        columns: Sequence[str] | Mapping[str, str] | None,
        hash_strings: Hashed,
        fill: Fill,
        fold: Collection[str] = (),
    ) -> Self:
        """Set the columns to read, as in ``gt.CsvSamples``. Raises InvalidArgument, ColumnMismatch."""
        wanted = self.columns if columns is None else columns
        types: dict[str, Any] = dict.fromkeys(fold, pa.int64())
        if isinstance(hash_strings, Sequence | Mapping):
            types |= dict.fromkeys(hash_strings, pa.string())
        if isinstance(columns, Mapping):
            types |= {name: type_named(name, kind).arrow for name, kind in columns.items()}
        schema = self._schema(types, wanted)
        self._plan = planned_columns(wanted, schema, self._files[0].name, hash_strings, fill, fold)
        self.types = self._plan.types
        for file, own in zip(self._files, self._names, strict=True):
            self._plan.require_in(pa.schema([(name, pa.null()) for name in own]), file.name, "columns")
        return self

    def read(self, part: int) -> SampleRows:
        """Read a block. Raises SourceDamaged."""
        folds = self._plan.folds
        types = {name: _parsed_as(kind, name in folds) for name, kind in self._plan.types.items()}
        table = self._parse(part, list(types), types)
        if table.num_rows != self.part_rows[part]:
            raise SourceDamaged(
                f"{self.name_row(part, 0)}: {self.part_rows[part]} lines hold {table.num_rows} rows; "
                "line breaks inside quotes are not read, and the file must not change"
            )
        for place, (name, kind) in enumerate(self._plan.types.items()):
            if kind.is_list or kind.item == "string":
                texts = table.column(name)
                texts = pc.if_else(pc.equal(texts, ""), None, texts)
                table = table.set_column(
                    place, name, pc.split_pattern(texts, self._list_delimiter) if kind.is_list else texts
                )
        samples = self._plan.apply(table, lambda row: self.name_row(part, row))
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
                convert_options=csv.ConvertOptions(
                    include_columns=names, column_types=dict(types), include_missing_columns=True
                ),
            )
        except pa.ArrowInvalid as exc:
            if bad:
                row = bad[0]
                raise SourceDamaged(
                    f"{self.name_row(part, row.number - 1)}: {row.actual_columns} columns, where there must be "
                    f"{row.expected_columns}: {quoted(row.text)}"
                ) from exc
            raise self._bad_value(part, content, types, exc) from exc

    def _content(self, block: _Block) -> bytes:
        with self._files[block.file].open() as opened:
            opened.seek(block.begin)
            return bytes(opened.read(block.num_bytes))

    def _bad_value(self, part: int, content: bytes, types: Mapping[str, Any], exc: Exception) -> SourceDamaged:
        """Find the first row of a value that does not fit its column's type: the parser's message does not name it."""
        file = self._blocks[part].file
        lines = [text for text in content.splitlines(keepends=True) if text.strip(b"\r\n")]

        def first_bad(name: str) -> int:
            def is_bad(number: int) -> bool:
                return bool(self._why_not(b"".join(lines[: number + 1]), file, name, types[name]))

            return bisect_left(range(len(lines)), True, key=is_bad)

        number, name = min(((first_bad(name), name) for name in types), key=itemgetter(0))
        if number == len(lines):
            return SourceDamaged(f"{self.name_row(part, 0)} or below: {exc}")
        line, kind, hint = lines[number], types[name], ""
        if self._guessed.get(name) == kind:
            is_text = kind == pa.float64() or self._why_not(line, file, name, pa.float64())
            hint = f"; lines before hold {kind}: {says_type(name, 'string' if is_text else 'float64')}"
            hint += says_hash(name) if is_text and self._plan.can_hash else ""
        elif kind == pa.int64() and not self._why_not(line, file, name, ANY_64_BITS):
            hint = says_fold(name)
        reason = quoted(self._why_not(line, file, name, kind))
        return SourceDamaged(f"{self.name_row(part, number)}: column {name!r} is no {kind}: {reason}{hint}")

    def _why_not(self, line: bytes, file: int, name: str, kind: Any) -> str:
        """Return why a value of a line does not fit a type; empty if it does."""
        try:
            csv.read_csv(
                io.BytesIO(line),
                read_options=csv.ReadOptions(column_names=self._names[file], use_threads=False),
                parse_options=csv.ParseOptions(delimiter=self._delimiter),
                convert_options=csv.ConvertOptions(
                    include_columns=[name], column_types={name: kind}, include_missing_columns=True
                ),
            )
        except pa.ArrowInvalid as reason:
            return str(reason)
        return ""

    def name_row(self, part: int, row: int) -> str:
        """Return file and line of a row of a block, in words; blank ones count."""
        block = self._blocks[part]
        lines = self._content(block).splitlines()
        line = [number for number, text in enumerate(lines) if text][row]
        return f"{self._files[block.file].name}, line {block.first_line + line}"


def _guess(arrow: Any) -> Any:
    """Return the type to read; dates and times of day are texts, unless stated otherwise."""
    return arrow if type_of(arrow) else pa.string()


def _parsed_as(kind: Any, is_folded: bool) -> Any:
    if kind.is_list:
        return pa.string()
    return ANY_64_BITS if is_folded else kind.arrow
