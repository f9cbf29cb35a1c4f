"""Samples of clicks in Parquet files of one's own: a column for each field, and ``click``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from geartrain.ams.values.errors import ColumnMismatch, ConfigError, SourceDamaged
from geartrain.workers.ctr.samples.click_samples import PADDING, ClickSamples, SampleSchema
from geartrain.workers.ctr.samples.kinds import BOOLEAN, ID_OF_MISSING, INTEGER, TEXT, FieldKind
from geartrain.workers.samples.columns import (
    IN_THE_FILE,
    MISSING,
    ColumnType,
    planned_columns,
    remedies,
    require_column,
    says_fold,
    type_of,
)
from geartrain.workers.samples.parquet import ParquetRows, schema_of

CLICK, TIME, USER, ITEM = "click", "time", "user", "item"
_ITEMS = {"int64": INTEGER, "string": TEXT, "bool": BOOLEAN}


@remedies(IN_THE_FILE)
def read_parquet(
    path: str, *, clicks: bool = True, kinds: Mapping[str, FieldKind] | None = None, fold: Sequence[str] = ()
) -> ClickSamples:
    """Read the Parquet file, folder or URL ``path`` into memory.

    ``click`` is 0 or 1 (without ``clicks`` it is not looked at, and is 0), ``time`` is a timestamp or Unix seconds, if
    there is one; neither may miss. Every other column is a field: integers are ids, texts are hashed, lists of either
    are bags; what is missing has its :data:`ID_OF_MISSING`. ``item`` and what begins with ``item_`` tell of the item,
    all others of the user and the moment; where there are ``user``, ``item`` and ``time``, samples have histories.
    ``kinds`` are those that a model was trained on: values of another kind are converted where that is exact, further
    columns are left alone, and they say what is folded. Else the fields ``fold`` hold any 64-bit integers, which
    ``gt.fold_ids`` makes ids of.

    Raises SourceError that names file, column and row of what is missing or cannot be, ConfigError without any field,
    InvalidArgument that names sample, field and value of another kind.
    """
    schema, known = schema_of(path), kinds or {}
    found = [name for name in schema.names if name not in (CLICK, TIME)]
    names = list(known) or found
    if lacking := [name for name in names if name not in found]:
        raise ColumnMismatch(
            f"{path} has no column {lacking[0]!r}, which the model was trained on; it has {_names(found)}"
        )
    if clicks and CLICK not in schema.names:
        raise ColumnMismatch(
            f"{path} has no column {CLICK!r}, which says by 0 or 1 what was clicked; it has {_names(found)}"
        )
    if not known and (unknown := [name for name in fold if name not in found]):
        raise ConfigError(f"fold names {unknown[0]!r}, which is no field of {path}; it has {_names(found)}")
    if not names:
        raise ConfigError(f"{path} has no column beside {CLICK} and {TIME}; give it fields: user, item, …")
    others = [name for name in (CLICK, TIME) if name in schema.names and (clicks or name == TIME)]
    types = {name: _type_of(path, schema, name, known.get(name)) for name in [*others, *names]}
    if texts := [name for name in others if types[name].item == "string"]:
        raise ColumnMismatch(f"column {texts[0]!r} of {path} holds texts; it must hold numbers")
    own = {name: known.get(name) or _kind_of(path, name, types[name], name in fold) for name in names}
    columns: dict[str, npt.NDArray[Any]] = {
        name: _converted(path, name, own[name], types[name]) for name in names if not _is_read(types[name], own[name])
    }
    plain = {
        name: str(replace(kind, item="int64") if name in own and kind.item == "bool" else kind)  # so that -1 can miss
        for name, kind in types.items()
        if name not in columns
    }
    missing = {name: PADDING for name in plain if name in own and own[name].fill == PADDING}
    columns |= _read(path, plain, missing, [name for name in own if own[name].fold and name in plain]) if plain else {}
    clicked, times = columns.pop(CLICK, None), columns.pop(TIME, None)
    columns = {name: columns[name] for name in names}
    if clicked is None:
        clicked = np.zeros(len(columns[names[0]]))
    if len(bad := np.flatnonzero((clicked != 0) & (clicked != 1))):
        raise SourceDamaged(f"{path}, sample {bad[0]}: {CLICK} is {clicked[bad[0]]}; it must be 0 or 1")
    item = (ITEM, *(name for name in columns if name.startswith(f"{ITEM}_"))) if ITEM in columns else ()
    has_users = USER in columns and columns[USER].ndim == 1 and bool(item) and columns[ITEM].ndim == 1
    return ClickSamples(
        fields=columns,
        clicks=clicked.astype(np.float32),
        times=None if times is None else times.astype(np.int64),
        schema=SampleSchema(item=item, user=USER if has_users else None, kinds=own),
    )


def _read(
    path: str, types: Mapping[str, str], fill: Mapping[str, int], fold: Sequence[str]
) -> dict[str, npt.NDArray[Any]]:
    source = ParquetRows(path, columns=types, hash_strings=True, fill=fill, fold=fold)
    parts: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in types}
    rows = 0
    for part, count in enumerate(source.part_rows):
        for name, values in source.read(part).batch({}).items():
            parts[name].append(_array(path, name, values, rows, fill.get(name, 0)))
        rows += count
    return {name: _joined(some, source.types[name].is_list) for name, some in parts.items()}


def _type_of(path: str, schema: Any, name: str, kind: FieldKind | None) -> ColumnType:
    """The type to read a column as: the field's if it has no value, integers if it has the moments of samples."""
    require_column(name, schema.names, path)
    arrow = schema.field(name).type
    if type_of(arrow) is None and name == TIME:
        return ColumnType("int64")
    if type_of(arrow) is None and kind is not None:
        wanted = ColumnType(next(item for item in _ITEMS if _ITEMS[item] == kind.item), is_list=kind.is_list)
        if wanted.holds(arrow):
            return wanted
    return planned_columns([name], schema, path, True, {}).types[name]


def _kind_of(path: str, name: str, found: ColumnType, is_folded: bool) -> FieldKind:
    if found.item not in _ITEMS:
        raise ColumnMismatch(
            f"column {name!r} of {path} holds numbers with fractions, and fields are ids; cut them into buckets, or "
            "leave it out"
        )
    item = _ITEMS[found.item]
    if is_folded and item != INTEGER:
        raise ConfigError(f"fold names {name!r}, and that column of {path} is {found}; leave it out there")
    return FieldKind(item=item, is_list=found.is_list, fill=ID_OF_MISSING[item], fold=is_folded)


def _is_read(found: ColumnType, kind: FieldKind) -> bool:
    """Whether a column is read as it is."""
    return _ITEMS.get(found.item) == kind.item and kind.is_list >= found.is_list


def _converted(path: str, name: str, kind: FieldKind, found: ColumnType) -> npt.NDArray[np.int64]:
    """The ids [N] or [N, L] of a column of another kind than the field. Raises InvalidArgument, SourceDamaged."""
    source = ParquetRows(path, columns={name: str(found)}, hash_strings=None, fill={name: MISSING})
    tables = (source.read(part).table for part in range(len(source.part_rows)))
    values = [value for table in tables for value in table.column(name).to_pylist()]
    ids = kind.bags(values, lambda at: f"{path}, sample {at}: {name}") if values else np.empty((0, 1), np.int64)
    return ids if kind.is_list else ids[:, 0]


def _array(path: str, name: str, values: Tensor | tuple[Tensor, Tensor], row: int, least: int) -> npt.NDArray[Any]:
    """[B], or [B, L] of a bag, of a batch that begins at sample ``row``. Ids below ``least`` are an error."""
    if name in (CLICK, TIME):
        if not isinstance(values, Tensor) or values.ndim > 1:
            raise ColumnMismatch(f"column {name!r} of {path} holds lists; it must hold one number a sample")
        return values.numpy()
    ids = (values[0] if isinstance(values, tuple) else values).numpy()
    if (ids < least).any():
        place = int(np.flatnonzero(ids.reshape(-1) < least)[0])
        offsets = values[1].numpy() if isinstance(values, tuple) else np.arange(len(ids) + 1) * (ids.size // len(ids))
        sample = row + int(np.searchsorted(offsets, place, side="right")) - 1
        raise SourceDamaged(
            f"{path}, sample {sample}: {name} is {ids.reshape(-1)[place]}; ids are >= 0{says_fold(name)}"
        )
    if isinstance(values, Tensor):
        return ids.astype(np.int64)
    lengths = np.diff(values[1].numpy())
    bags = np.full((len(lengths), max(int(lengths.max(initial=0)), 1)), PADDING, np.int64)
    bags[np.arange(bags.shape[1]) < lengths[:, None]] = ids
    return bags


def _joined(parts: list[npt.NDArray[Any]], is_list: bool) -> npt.NDArray[Any]:
    if not parts:
        return np.empty((0, 1) if is_list else 0, np.int64)
    if parts[0].ndim == 1:
        return np.concatenate(parts)
    width = max(part.shape[1] for part in parts)
    return np.concatenate(
        [np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=PADDING) for part in parts]
    )


def _names(columns: Sequence[str]) -> str:
    return ", ".join(map(repr, columns)) or "none"
