"""Columns of sample tables: which there must be, of which type, and how they become ids and numbers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from geartrain.ams.values.arguments import integer, real_number
from geartrain.ams.values.errors import ColumnMismatch, InvalidArgument, SourceDamaged
from geartrain.ams.values.strings import hash_strings
from geartrain.ams.values.text import quoted

_ITEMS = {
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "string": pa.string(),
}
_TYPE = re.compile(r"(?:list<(?P<list>\w+)>|(?P<fixed>\w+)\[(?P<length>\d+)\]|(?P<item>\w+))")
_NAMED = 20

Hashed = bool | Sequence[str] | Mapping[str, int] | None
"""Which columns of strings become ids: all, none, some, some with seeds of their own; None: strings stay strings."""
NameRow = Callable[[int], str]
"""Of a row of a table, the words for where it is: "clicks.csv, line 7"."""


@dataclass(frozen=True)
class ColumnType:
    """``int64``, ``list<int64>``, or ``int64[8]``; float32, float64, bool and string as well."""

    item: str
    is_list: bool = False
    length: int | None = None
    """Of lists of one length."""

    def __str__(self) -> str:
        if not self.is_list:
            return self.item
        return f"list<{self.item}>" if self.length is None else f"{self.item}[{self.length}]"

    def holds(self, found: ColumnType) -> bool:
        """Whether a column of type ``found`` can be read as this one, each value as it is (floats to rounding)."""
        if self.is_list != found.is_list or (self.length is not None and self.length != found.length):
            return False
        is_number = found.item in ("int64", "float32", "float64")
        return self.item == found.item or (self.item.startswith("float") and is_number)

    @property
    def arrow(self) -> Any:
        """The Arrow type."""
        item = _ITEMS[self.item]
        if not self.is_list:
            return item
        return pa.list_(item) if self.length is None else pa.list_(item, self.length)


def type_named(column: str, name: object) -> ColumnType:
    """Raises InvalidArgument for a name that is none."""
    match = _TYPE.fullmatch(name.replace(" ", "")) if isinstance(name, str) else None
    item = next((match[group] for group in ("list", "fixed", "item") if match[group]), None) if match else None
    if match is None or item not in _ITEMS:
        raise InvalidArgument(
            f"the type of column {column!r} is {quoted(name)}; it must be one of {', '.join(_ITEMS)}, a list as "
            "'list<int64>', or one of a fixed length as 'int64[8]'"
        )
    return ColumnType(item, match["item"] is None, int(match["length"]) if match["length"] else None)


def type_of(arrow: Any) -> ColumnType | None:
    """The type of an Arrow column; None: none that samples can have."""
    types = pa.types
    if types.is_list(arrow) or types.is_large_list(arrow) or types.is_fixed_size_list(arrow):
        item = type_of(arrow.value_type)
        length = arrow.list_size if types.is_fixed_size_list(arrow) else None
        return None if item is None or item.is_list else ColumnType(item.item, is_list=True, length=length)
    if types.is_dictionary(arrow):
        return type_of(arrow.value_type)
    tests = {
        "int64": types.is_integer,
        "bool": types.is_boolean,
        "float64": types.is_float64,
        "float32": types.is_floating,
        "string": lambda kind: types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind),
    }
    kind = next((name for name, test in tests.items() if test(arrow)), None)
    return None if kind is None else ColumnType(kind)


@dataclass(frozen=True)
class ColumnPlan:
    """What is read of every file, and what becomes of it."""

    types: Mapping[str, ColumnType]
    """Of each column to read."""
    seeds: Mapping[str, int]
    """Of the hash of the columns of strings."""
    fill: Mapping[str, float]
    """Stands for a missing value, by column."""

    def require_in(self, schema: Any, file: str, said_by: str) -> None:
        """Raise ColumnMismatch unless a table of this schema has the columns; ``said_by`` is who wants their types."""
        for name, wanted in self.types.items():
            if name not in schema.names:
                raise missing_column(name, schema.names, file)
            arrow = schema.field(name).type
            found = type_of(arrow)
            if found is None or not wanted.holds(found):
                hint = ""
                if found is not None and found.item == "string":
                    hint = f"; for ids of texts, ask for a string and give hash_strings=[{name!r}]"
                raise ColumnMismatch(
                    f"column {name!r} of {file} is {arrow}; it must be {wanted}, as {said_by} says{hint}"
                )

    def apply(self, table: Any, name_row: NameRow) -> Any:
        """The columns as samples have them: of the planned types, strings hashed, nothing missing. Raises SourceDamaged
        for a value that is missing or does not fit, with its row.
        """
        columns = {name: self._column(name, table.column(name), name_row) for name in self.types}
        return pa.table(columns) if columns else table.select([])

    def _column(self, name: str, column: Any, name_row: NameRow) -> Any:
        wanted = self.types[name]
        array = whole_array(column)
        if not wanted.is_list:
            return self._values(name, array, lambda place: name_row(place))
        offsets = _offsets(array)
        values = array.flatten()  # without what null lists hide

        def name_item(place: int) -> str:
            return name_row(int(np.searchsorted(offsets, place, side="right")) - 1)

        values = self._values(name, values, name_item)
        if wanted.length is not None:
            others = np.flatnonzero(np.diff(offsets) != wanted.length)
            if len(others):
                row = int(others[0])
                found = offsets[row + 1] - offsets[row]
                raise SourceDamaged(f"{name_row(row)}: column {name!r} has {found} values; it must be {wanted}")
            return pa.FixedSizeListArray.from_arrays(values, wanted.length)
        return pa.LargeListArray.from_arrays(pa.array(offsets), values)

    def _values(self, name: str, array: Any, name_place: NameRow) -> Any:
        wanted = self.types[name].item
        if array.null_count:
            if name not in self.fill:
                place = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
                raise SourceDamaged(
                    f"{name_place(place)}: column {name!r} has no value; say what stands for it: fill={{{name!r}: -1}}"
                )
            if wanted == "string":
                raise InvalidArgument(f"fill of column {name!r} stands for missing numbers; strings have none")
            array = array.cast(_ITEMS[wanted]).fill_null(pa.scalar(self.fill[name], _ITEMS[wanted]))
        if name in self.seeds:
            return pa.array(hash_strings(array, seed=self.seeds[name]))
        if array.type == _ITEMS[wanted]:
            return array
        try:
            return array.cast(_ITEMS[wanted], safe=not wanted.startswith("float"))
        except pa.ArrowInvalid as exc:
            raise SourceDamaged(f"{name_place(_first_bad(array, wanted))}: column {name!r}: {exc}") from exc


def whole_array(column: Any) -> Any:
    """A column of a table as one array."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):  # of no chunk, or too large for one
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    return array


def _offsets(array: Any) -> Any:
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _first_bad(array: Any, wanted: str) -> int:
    """Of an array that has a value which does not fit, the place of the first one."""
    low, high = 0, len(array)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            array.slice(low, middle - low).cast(_ITEMS[wanted])
            low = middle
        except pa.ArrowInvalid:
            high = middle
    return low


def planned_columns(
    columns: Sequence[str] | Mapping[str, str] | None,
    schema: Any,
    file: str,
    hashed: Hashed,
    fill: Mapping[str, float],
) -> ColumnPlan:
    """What a user asked for, made whole from the schema of the first file. Raises InvalidArgument, ColumnMismatch."""
    if isinstance(columns, str):
        raise InvalidArgument(f"columns is {quoted(columns)}; give a list of names, or a mapping to types")
    if isinstance(columns, Mapping):
        types = {name: type_named(name, kind) for name, kind in columns.items()}
    else:
        types = {}
        for name in schema.names if columns is None else columns:
            if name not in schema.names:
                raise missing_column(name, schema.names, file)
            found = type_of(schema.field(name).type)
            if found is None:
                raise ColumnMismatch(
                    f"column {name!r} of {file} is {schema.field(name).type}; samples have integers, floats, bools, "
                    "strings to hash, and lists of these: leave it out, or write it as one of them"
                )
            types[name] = found
    if not types:
        raise InvalidArgument(f"no column of {file} is read; name at least one; it has {_listed(list(schema.names))}")
    ColumnPlan(types, {}, {}).require_in(schema, file, "columns")
    seeds = _seeds(hashed, types)
    _check_fill(fill, types)
    for name, kind in types.items():
        if kind.item == "string" and name not in seeds and hashed is not None:
            raise InvalidArgument(
                f"column {name!r} of {file} holds strings; hash_strings=[{name!r}] makes ids of them, "
                "hash_strings=True of all strings"
            )
    return ColumnPlan(types, seeds, dict(fill))


def _check_fill(fill: Mapping[str, float], types: Mapping[str, ColumnType]) -> None:
    for name, value in fill.items():
        if name not in types:
            raise InvalidArgument(f"fill names column {name!r}, which is not read; there are {_listed(list(types))}")
        item, what = types[name].item, f"fill of column {name!r}, which is {types[name]},"
        if item == "int64":
            integer(what, value, -(2**63), 2**63 - 1)
        elif item in ("float32", "float64"):
            real_number(what, value)
        elif item == "bool" and value not in (False, True):
            raise InvalidArgument(f"{what} is {quoted(value)}; it must be True or False")


def _seeds(hashed: Hashed, types: Mapping[str, ColumnType]) -> dict[str, int]:
    if hashed is None or isinstance(hashed, bool):
        return {name: 0 for name, kind in types.items() if hashed and kind.item == "string"}
    if isinstance(hashed, str):
        raise InvalidArgument(f"hash_strings is {quoted(hashed)}; give True, a list of columns, or a mapping to seeds")
    seeds = dict(hashed) if isinstance(hashed, Mapping) else dict.fromkeys(hashed, 0)
    for name, seed in seeds.items():
        if name not in types:
            raise InvalidArgument(f"hash_strings names column {name!r}, which is not read; {_listed(list(types))} are")
        if types[name].item != "string":
            raise ColumnMismatch(f"column {name!r} is {types[name]}; hash_strings takes strings, leave it out there")
        integer(f"the seed of column {name!r}", seed, 0, 2**64 - 1)
    return seeds


def missing_column(name: str, names: Sequence[str], file: str) -> ColumnMismatch:
    """The error of a column that is not there, with those that it could have meant."""
    near = difflib.get_close_matches(str(name), list(names), 3, 0.6)
    meant = f"did you mean {' or '.join(map(repr, near))}? It" if near else "it"
    return ColumnMismatch(f"{file} has no column {name!r}; {meant} has {_listed(list(names))}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more if names else "none"
