"""Columns of sample tables: checks of their types, and conversion to ids and numbers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from geartrain.ams.values.arguments import integer, real_number
from geartrain.ams.values.arrays import ID_BITS
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
ANY_64_BITS = pa.decimal128(20, 0)
"""Type that holds signed and unsigned 64-bit values, which no integer type does."""
_TYPE = re.compile(r"(?:list<(?P<list>\w+)>|(?P<fixed>\w+)\[(?P<length>\d+)\]|(?P<item>\w+))")
_NAMED = 20

Hashed = bool | Sequence[str] | Mapping[str, int | None] | None
"""Columns of strings to hash to ids: all, none, some, or some with seeds of their own (None: keep the strings); None:
all."""
Fill = Mapping[str, float | str]
"""Replacement of a missing value, by column."""
MISSING: Any = object()
"""Marker in place of a replacement: missing values stay, and are handled one by one."""
NameRow = Callable[[int], str]
"""Function that returns the place of a table's row in words: "clicks.csv, line 7"."""


class Remedies(NamedTuple):
    """Wording of remedies in errors: for readers with arguments, options, or nothing but the file."""

    fill: str
    kind: str
    without: str
    fold: str
    hash: str = ""
    fractions: bool = True
    """Whether a column may hold numbers with fractions."""
    of_numbers: Mapping[str, Remedies] = {}
    """Columns of plain numbers, which have no settings, with what holds for them instead."""


IN_PYTHON = Remedies(
    "say what stands for it: fill={{{name!r}: {value!r}}}",
    "say its type, beside those of the other columns: columns={{{name!r}: {value!r}, ...}}",
    "name the columns without it: columns=[...]",
    "make ids of them: fold=[{name!r}]",
    "hash_strings=[{name!r}]",
)
ON_THE_COMMAND_LINE = Remedies(
    "say what stands for it: --fill {name}={value}",
    "say its type, and those of the other columns: --column {name}:{value}",
    "name the others: --column NAME for each",
    "make ids of them: --fold {name}",
)
IN_THE_FILE = Remedies(
    "write one there, or leave the row out",
    "write it as {value}",
    "leave it out of the file",
    "begin a run that makes ids of them: --set 'fold=[{name}]'",
    fractions=False,
)
AS_TRAINED = IN_THE_FILE._replace(kind="the model was trained on such values, write one there")
IN_THE_RECIPE = IN_THE_FILE._replace(
    kind="say what it is: --set 'features.{name}.kind={value}'",
    without="leave it out: --set features.{name}.kind=none",
    of_numbers=dict.fromkeys(("click", "time"), IN_THE_FILE._replace(kind="write whole numbers there")),
)
_REMEDIES: ContextVar[Remedies] = ContextVar("remedies", default=IN_PYTHON)
EXAMPLES: Mapping[str, float] = {"int64": -1, "float32": 0.0, "float64": 0.0, "bool": False}
"""Example replacements of a missing value, for types without a default."""


@contextmanager
def remedies(spelled: Remedies) -> Iterator[None]:
    """Use the wording ``spelled`` for errors raised meanwhile."""
    before = _REMEDIES.set(spelled)
    try:
        yield
    finally:
        _REMEDIES.reset(before)


@dataclass(frozen=True)
class ColumnType:
    """Type of a column: ``int64``, ``list<int64>``, or ``int64[8]``; also float32, float64, bool and string."""

    item: str
    is_list: bool = False
    length: int | None = None
    """Length of lists of one length."""

    def __str__(self) -> str:
        if not self.is_list:
            return self.item
        return f"list<{self.item}>" if self.length is None else f"{self.item}[{self.length}]"

    def holds(self, arrow: Any) -> bool:
        """Return whether a column of an Arrow type can be read as this one without changing a value (floats to
        rounding). True for one without any value.
        """
        if pa.types.is_null(arrow):
            return True
        if pa.types.is_list(arrow) and pa.types.is_null(arrow.value_type):
            return self.is_list
        found = type_of(arrow)
        if found is None:
            return False
        if self.is_list != found.is_list or (self.length is not None and self.length != found.length):
            return False
        is_number = found.item in ("int64", "float32", "float64")
        return (
            self.item == found.item
            or (self.item.startswith("float") and is_number)
            or (self.item == "int64" and found.item == "bool")
        )

    @property
    def arrow(self) -> Any:
        """Corresponding Arrow type."""
        item = _ITEMS[self.item]
        if not self.is_list:
            return item
        return pa.list_(item) if self.length is None else pa.list_(item, self.length)


def type_named(column: str, name: object) -> ColumnType:
    """Parse a type's name. Raises InvalidArgument for an unknown one."""
    match = _TYPE.fullmatch(name.replace(" ", "")) if isinstance(name, str) else None
    item = next((match[group] for group in ("list", "fixed", "item") if match[group]), None) if match else None
    if match is None or item not in _ITEMS:
        raise InvalidArgument(
            f"the type of column {column!r} is {quoted(name)}; it must be one of {', '.join(_ITEMS)}, a list as "
            "'list<int64>', or one of a fixed length as 'int64[8]'"
        )
    return ColumnType(item, match["item"] is None, int(match["length"]) if match["length"] else None)


def type_of(arrow: Any) -> ColumnType | None:
    """Return the type of an Arrow column; None if samples cannot have it."""
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


def _is_moment(arrow: Any) -> bool:
    return bool(pa.types.is_timestamp(arrow) or pa.types.is_date(arrow))


def _is_number(arrow: Any) -> bool:
    """Return whether a column of an unsupported type becomes numbers if its type is stated."""
    return _is_moment(arrow) or bool(pa.types.is_decimal(arrow))


def _remedies_of(name: str) -> Remedies:
    spelled = _REMEDIES.get()
    return spelled.of_numbers.get(name, spelled)


def says_type(name: str, kind: str) -> str:
    """Return the remedy for a column whose type must be stated."""
    return _remedies_of(name).kind.format(name=name, value=kind)


def says_fold(name: str) -> str:
    """Return the remedy for a column whose values are not ids, but any 64-bit values."""
    return f"; if these are hashes or other 64-bit values, {_REMEDIES.get().fold.format(name=name)}"


def says_hash(name: str) -> str:
    """Return the addition to that remedy for a column of texts; may be empty."""
    return f", {_REMEDIES.get().hash.format(name=name)}" if _REMEDIES.get().hash else ""


def _says_texts(name: str, wanted: ColumnType, found: ColumnType) -> str:
    """Return the remedy for a column of texts of which another type was asked."""
    if _REMEDIES.get().hash:
        return f"for ids of texts, ask for a string and give hash_strings=[{name!r}]"
    is_setting = _remedies_of(name).kind in (ON_THE_COMMAND_LINE.kind, IN_THE_RECIPE.kind)
    return says_type(name, str(found if is_setting else wanted))


def joint_schema(schemas: Sequence[Any]) -> Any:
    """Return the columns of several files of a source, those of the first one first. A type is that of the first file
    with values in the column; float64 where some have float32 and others a wider number.
    """
    fields = list(schemas[0])
    known = {field.name for field in fields}
    for schema in schemas[1:]:
        fields += [field for field in schema if field.name not in known]
        known.update(schema.names)
    found: dict[str, dict[Any, None]] = {name: {} for name in known}
    for schema in schemas:
        for field in schema:
            found[field.name][field.type] = None
    return pa.schema([(field.name, _joint(list(found[field.name]))) for field in fields])


def _joint(types: Sequence[Any]) -> Any:
    first = next((arrow for arrow in types if type_of(arrow) is not None), types[0])
    kind = type_of(first)
    if kind is None or kind.item != "float32":
        return first
    wider = replace(kind, item="float64")
    return wider.arrow if any(type_of(arrow) not in (None, kind) and wider.holds(arrow) for arrow in types) else first


def require_column(name: str, names: Sequence[str], file: str) -> None:
    """Raise ColumnMismatch unless a table with columns ``names`` has exactly one of that name."""
    count = list(names).count(name)
    if not count:
        near = difflib.get_close_matches(str(name), list(names), 3, 0.6)
        meant = f"did you mean {' or '.join(map(repr, near))}? It" if near else "it"
        raise ColumnMismatch(f"{file} has no column {name!r}; {meant} has {_listed(list(names))}")
    if count > 1:
        without = _remedies_of(name).without.format(name=name)
        raise ColumnMismatch(f"{file} has {count} columns {name!r}; give them names of their own, or {without}")


@dataclass(frozen=True)
class ColumnPlan:
    """Columns to read from every file, and their conversion."""

    types: Mapping[str, ColumnType]
    """Type of each column to read."""
    seeds: Mapping[str, int]
    """Hash seeds of the columns of strings."""
    fill: Fill
    can_hash: bool = True
    folds: Collection[str] = ()
    """Columns of any 64-bit values, which become ids."""

    def require_in(self, schema: Any, file: str, said_by: str, *, is_said: bool = True) -> None:
        """Raise ColumnMismatch unless a table of this schema has the columns, or replacements; ``said_by`` names the
        source of their types. Moments become Unix seconds only if a person has stated the type (``is_said``).
        """
        for name, wanted in self.types.items():
            if name in self.fill and name not in schema.names:
                continue
            require_column(name, schema.names, file)
            arrow = schema.field(name).type
            is_number = (
                (is_said or name in self.folds) and _is_number(arrow) and str(wanted) in ("int64", "float32", "float64")
            )
            if not (is_number or wanted.holds(arrow)):
                hint, found = "", type_of(arrow)
                if not _REMEDIES.get().hash and said_by != "columns":
                    hint = f"; write the file with {wanted} there, or take it away"
                elif found is not None and found.item == "string" and (self.can_hash or not _REMEDIES.get().hash):
                    hint = f"; {_says_texts(name, wanted, found)}"
                elif found == replace(wanted, item="float64"):
                    hint = f"; to read both, {says_type(name, str(found))}"
                source = "" if said_by == "columns" and not _REMEDIES.get().hash else f", as {said_by} says"
                raise ColumnMismatch(f"column {name!r} of {file} is {arrow}; it must be {wanted}{source}{hint}")

    def apply(self, table: Any, name_row: NameRow) -> Any:
        """Return the columns of samples: of the planned types, strings hashed, nothing missing. Raises SourceDamaged
        for a value that is missing or does not fit, with its row.
        """
        table = self.aligned(table)
        columns = {name: self._column(name, table.column(name), name_row) for name in self.types}
        return pa.table(columns) if columns else table.select([])

    def aligned(self, table: Any) -> Any:
        """Return the planned columns of a table; absent ones, and those without a type, are missing values."""
        columns: dict[str, Any] = {}
        for name, wanted in self.types.items():
            column = table.column(name) if name in table.column_names else pa.nulls(table.num_rows)
            if pa.types.is_null(column.type):
                column = pa.nulls(table.num_rows, wanted.arrow)
            columns[name] = column
        return pa.table(columns) if columns else table.select([])

    def _column(self, name: str, column: Any, name_row: NameRow) -> Any:
        wanted = self.types[name]
        array = whole_array(column)
        if not wanted.is_list:
            return self._values(name, array, lambda place: name_row(place))
        offsets = _offsets(array)
        values = array.flatten()  # without values hidden by null lists

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
        if pa.types.is_dictionary(array.type) and (array.null_count or array.dictionary.null_count):
            array = array.dictionary_decode()
        stands_for = self.fill.get(name, "" if wanted == "string" else None)
        if array.null_count and stands_for is None:
            place = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
            remedy = _REMEDIES.get().fill.format(name=name, value=EXAMPLES[wanted])
            raise SourceDamaged(f"{name_place(place)}: column {name!r} has no value; {remedy}")
        convert = _folded if name in self.folds else partial(_as_item, wanted=wanted)
        if name in self.folds or (
            array.type != _ITEMS[wanted] and (name not in self.seeds or pa.types.is_null(array.type))
        ):
            try:
                array = convert(array)
            except pa.ArrowInvalid as exc:
                hint = says_fold(name) if pa.types.is_uint64(array.type) else ""
                raise SourceDamaged(f"{name_place(_first_bad(array, convert))}: column {name!r}: {exc}{hint}") from exc
        if array.null_count and stands_for is not MISSING:
            array = array.fill_null(pa.scalar(stands_for, array.type))
        return pa.array(hash_strings(array, seed=self.seeds[name])) if name in self.seeds else array


def _as_item(array: Any, wanted: str) -> Any:
    """Cast an array. Raises ArrowInvalid for a value that does not fit."""
    if _is_moment(array.type):
        zone = getattr(array.type, "tz", None)
        seconds = array.cast(pa.timestamp("us", zone), safe=False).cast(pa.int64()).to_numpy(zero_copy_only=False) / 1e6
        array = pa.array(np.floor(seconds) if wanted == "int64" else seconds, from_pandas=True)
    return array.cast(_ITEMS[wanted], safe=not wanted.startswith("float"))


def _folded(array: Any) -> Any:
    """Fold integers, decimals without fractions, and texts of digits, as ``gt.fold_ids``. Raises ArrowInvalid."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_string(array.type) or pa.types.is_decimal(array.type):
        exact = array.cast(ANY_64_BITS)
        is_negative, nothing = pc.less(exact, 0), pa.scalar(None, ANY_64_BITS)
        unsigned = pc.if_else(is_negative, nothing, exact).cast(pa.uint64())
        array = pc.coalesce(
            pc.if_else(is_negative, exact, nothing).cast(pa.int64()), unsigned.cast(pa.int64(), safe=False)
        )
    return pc.bit_wise_and(array.cast(pa.int64(), safe=False), ID_BITS)


def whole_array(column: Any) -> Any:
    """Return a column of a table as one array."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):  # without chunks, or too large for one
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    return array


def _offsets(array: Any) -> Any:
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _first_bad(array: Any, convert: Callable[[Any], Any]) -> int:
    """Return the place of the first value that does not fit; the array must have one."""
    low, high = 0, len(array)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            convert(array.slice(low, middle - low))
            low = middle
        except pa.ArrowInvalid:
            high = middle
    return low


def planned_columns(
    columns: Sequence[str] | Mapping[str, str] | None,
    schema: Any,
    file: str,
    hashed: Hashed,
    fill: Fill,
    folds: Collection[str] = (),
) -> ColumnPlan:
    """Complete the user's column settings from the first file's schema. Raises InvalidArgument, ColumnMismatch."""
    if isinstance(columns, str):
        raise InvalidArgument(f"columns is {quoted(columns)}; give a list of names, or a mapping to types")
    if isinstance(columns, Mapping):
        types = {name: type_named(name, kind) for name, kind in columns.items()}
    else:
        types = {}
        for name in schema.names if columns is None else columns:
            require_column(name, schema.names, file)
            found = ColumnType("int64") if name in folds and pa.types.is_decimal(schema.field(name).type) else None
            found = found or type_of(schema.field(name).type)
            if found is None:
                raise ColumnMismatch(_no_type(name, schema.field(name).type, file))
            types[name] = found
    if not types:
        raise InvalidArgument(f"no column of {file} is read; name at least one; it has {_listed(list(schema.names))}")
    _check_folds(folds, types)
    ColumnPlan(types, {}, {}, hashed is not None, folds).require_in(schema, file, "columns")
    seeds = _seeds(hashed, types)
    _check_fill(fill, types)
    for name, kind in types.items():
        stays = hashed is None or (isinstance(hashed, Mapping) and name in hashed)
        if kind.item == "string" and name not in seeds and not stays:
            raise InvalidArgument(
                f"column {name!r} of {file} holds strings; hash_strings=[{name!r}] makes ids of them, "
                "hash_strings=True of all strings"
            )
    return ColumnPlan(types, seeds, dict(fill), hashed is not None, folds)


def _no_type(name: str, arrow: Any, file: str) -> str:
    spelled = _remedies_of(name)
    if any(ColumnType("int64", is_list=is_list).holds(arrow) for is_list in (False, True)):
        remedy = says_type(name, "int64" if pa.types.is_null(arrow) else "list<int64>")
        if spelled is IN_THE_FILE:
            remedy = spelled.without.format(name=name)
        elif spelled.fill != IN_THE_FILE.fill:  # else what is missing needs nothing beside the type
            remedy += f", and {spelled.fill.format(name=name, value=EXAMPLES['int64'])}"
        return f"column {name!r} of {file} has no value that shows its type; {remedy}"
    kinds = "samples have integers, floats, bools, strings to hash, and lists of these"
    what = ""
    is_whole = _is_moment(arrow) or (pa.types.is_decimal(arrow) and arrow.scale <= 0)
    if is_whole or (_is_number(arrow) and spelled.fractions):
        value = "int64" if is_whole else "float64"
        what = f", or {says_type(name, value)}{' for Unix seconds' * _is_moment(arrow)}"
    return f"column {name!r} of {file} is {arrow}; {kinds}: {spelled.without.format(name=name)}{what}"


def _check_fill(fill: Fill, types: Mapping[str, ColumnType]) -> None:
    for name, value in fill.items():
        if name not in types:
            raise InvalidArgument(f"fill names column {name!r}, which is not read; there are {_listed(list(types))}")
        if value is MISSING:
            continue
        item, what = types[name].item, f"fill of column {name!r}, which is {types[name]},"
        if item == "int64":
            integer(what, value, -(2**63), 2**63 - 1)
        elif item in ("float32", "float64"):
            real_number(what, value)
        elif item == "bool":
            if value not in (False, True):
                raise InvalidArgument(f"{what} is {quoted(value)}; it must be True or False")
        elif not isinstance(value, str):
            raise InvalidArgument(f"{what} is {quoted(value)}; it must be a text")


def _check_folds(folds: Collection[str], types: Mapping[str, ColumnType]) -> None:
    if isinstance(folds, str):
        raise InvalidArgument(f"fold is {quoted(folds)}; give a list of columns")
    for name in folds:
        if name not in types:
            raise InvalidArgument(f"fold names column {name!r}, which is not read; there are {_listed(list(types))}")
        if types[name].item != "int64":
            raise ColumnMismatch(f"column {name!r} is {types[name]}; fold takes int64 and lists of it, leave it out")


def _seeds(hashed: Hashed, types: Mapping[str, ColumnType]) -> dict[str, int]:
    if hashed is None or isinstance(hashed, bool):
        return {name: 0 for name, kind in types.items() if hashed and kind.item == "string"}
    if isinstance(hashed, str):
        raise InvalidArgument(f"hash_strings is {quoted(hashed)}; give True, a list of columns, or a mapping to seeds")
    seeds: dict[str, int | None] = dict(hashed) if isinstance(hashed, Mapping) else dict.fromkeys(hashed, 0)
    for name, seed in seeds.items():
        if name not in types:
            raise InvalidArgument(f"hash_strings names column {name!r}, which is not read; {_listed(list(types))} are")
        if types[name].item != "string":
            raise ColumnMismatch(f"column {name!r} is {types[name]}; hash_strings takes strings, leave it out there")
        if seed is not None:
            integer(f"the seed of column {name!r}", seed, 0, 2**64 - 1)
    return {name: seed for name, seed in seeds.items() if seed is not None}


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(repr, names[:_NAMED])) + more if names else "none"
