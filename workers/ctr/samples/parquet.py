"""Samples of clicks in Parquet files of one's own: a column for each field, and ``click``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from geartrain.ams.values.errors import ColumnMismatch, ConfigError, SourceDamaged
from geartrain.workers.ctr.samples.click_samples import PADDING, ClickSamples, SampleSchema
from geartrain.workers.ctr.samples.kinds import BOOLEAN, INTEGER, TEXT, FieldKind
from geartrain.workers.samples.files import ParquetSamples

if TYPE_CHECKING:
    from geartrain.workers.samples.columns import ColumnType

CLICK, TIME, USER, ITEM = "click", "time", "user", "item"
_AT_ONCE = 65_536
_ITEMS = {"int64": INTEGER, "string": TEXT, "bool": BOOLEAN}


def read_parquet(path: str, *, clicks: bool = True, kinds: Mapping[str, FieldKind] | None = None) -> ClickSamples:
    """Read the Parquet file, folder or URL ``path`` into memory.

    ``click`` is 0 or 1 (without ``clicks`` it may be missing, and is then 0), ``time`` is Unix seconds, if there is
    one. Every other column is a field: integers are ids, texts are hashed, lists of either are bags. ``item`` and
    what begins with ``item_`` tell of the item, all others of the user and the moment; where there are ``user``,
    ``item`` and ``time``, samples have histories. ``kinds`` are those that a model was trained on: values of another
    kind are converted where that is exact.

    Raises SourceError that names file, column and row of what is missing or cannot be, ConfigError without any field,
    InvalidArgument that names sample, field and value of another kind.
    """
    samples = ParquetSamples(path, batch_size=_AT_ONCE, hash_strings=True)
    types, known = samples.types, kinds or {}
    if texts := [name for name in (CLICK, TIME) if name in types and types[name].item == "string"]:
        raise ColumnMismatch(f"column {texts[0]!r} of {path} holds texts; it must hold numbers")
    converted = {
        name: _converted(path, name, kind, types[name])
        for name, kind in known.items()
        if name in types and not _is_read(types[name], kind)
    }
    plain = [name for name in types if name not in converted]
    if converted and plain:
        samples = ParquetSamples(path, batch_size=_AT_ONCE, hash_strings=True, columns=plain)
    parts: dict[str, list[npt.NDArray[Any]]] = {}
    rows = 0
    for batch in samples if plain else ():
        for name, values in batch.items():
            parts.setdefault(name, []).append(_array(path, name, values, rows))
        rows += batch.num_samples
    read = converted | {name: _joined(some) for name, some in parts.items()}
    columns = {name: read[name] for name in types if name in read}
    clicked, times = columns.pop(CLICK, None), columns.pop(TIME, None)
    if clicked is None and clicks:
        raise ColumnMismatch(
            f"{path} has no column {CLICK!r}, which says by 0 or 1 what was clicked; it has {_names(columns)}"
        )
    if clicked is None:
        clicked = np.zeros(samples.num_samples)
    if len(bad := np.flatnonzero((clicked != 0) & (clicked != 1))):
        raise SourceDamaged(f"{path}, sample {bad[0]}: {CLICK} is {clicked[bad[0]]}; it must be 0 or 1")
    if not columns:
        raise ConfigError(f"{path} has no column beside {CLICK} and {TIME}; give it fields: user, item, …")
    item = (ITEM, *(name for name in columns if name.startswith(f"{ITEM}_"))) if ITEM in columns else ()
    has_users = USER in columns and columns[USER].ndim == 1 and bool(item) and columns[ITEM].ndim == 1
    own = {name: FieldKind(item=_ITEMS[types[name].item], is_list=types[name].is_list) for name in columns}
    own |= {name: kind for name, kind in known.items() if name in columns}
    schema = SampleSchema(item=item, user=USER if has_users else None, kinds=own)
    return ClickSamples(
        fields=columns,
        clicks=clicked.astype(np.float32),
        times=None if times is None else times.astype(np.int64),
        schema=schema,
    )


def _is_read(found: ColumnType, kind: FieldKind) -> bool:
    """Whether a column is read as it is."""
    return _ITEMS.get(found.item) == kind.item and kind.is_list >= found.is_list and kind.fill is None


def _converted(path: str, name: str, kind: FieldKind, found: ColumnType) -> npt.NDArray[np.int64]:
    """The ids [N] or [N, L] of a column of another kind than the field. Raises InvalidArgument, SourceDamaged."""
    from geartrain.workers.samples.parquet import ParquetRows

    fill = {} if kind.fill is None or found.item == "string" else {name: kind.fill}
    source = ParquetRows(path, columns=[name], hash_strings=None, fill=fill)
    tables = (source.read(part).table for part in range(len(source.part_rows)))
    values = [value for table in tables for value in table.column(name).to_pylist()]
    ids = kind.bags(values, lambda at: f"{path}, sample {at}: {name}")
    return ids if kind.is_list else ids[:, 0]


def _array(path: str, name: str, values: Tensor | tuple[Tensor, Tensor], row: int) -> npt.NDArray[Any]:
    """[B], or [B, L] of a bag, of a batch that begins at sample ``row``."""
    if name in (CLICK, TIME):
        if not isinstance(values, Tensor) or values.ndim > 1:
            raise ColumnMismatch(f"column {name!r} of {path} holds lists; it must hold one number a sample")
        return values.numpy()
    ids = (values[0] if isinstance(values, tuple) else values).numpy()
    if ids.dtype.kind == "f":
        raise ColumnMismatch(
            f"column {name!r} of {path} holds numbers with fractions, and fields are ids; cut them into buckets, or "
            "leave it out"
        )
    if (ids < 0).any():
        place = int(np.flatnonzero(ids.reshape(-1) < 0)[0])
        offsets = values[1].numpy() if isinstance(values, tuple) else np.arange(len(ids) + 1) * (ids.size // len(ids))
        sample = row + int(np.searchsorted(offsets, place, side="right")) - 1
        raise SourceDamaged(f"{path}, sample {sample}: {name} is {ids.reshape(-1)[place]}; ids are >= 0")
    if isinstance(values, Tensor):
        return ids.astype(np.int64)
    lengths = np.diff(values[1].numpy())
    bags = np.full((len(lengths), max(int(lengths.max(initial=0)), 1)), PADDING, np.int64)
    bags[np.arange(bags.shape[1]) < lengths[:, None]] = ids
    return bags


def _joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    if parts[0].ndim == 1:
        return np.concatenate(parts)
    width = max(part.shape[1] for part in parts)
    return np.concatenate(
        [np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=PADDING) for part in parts]
    )


def _names(columns: dict[str, Any]) -> str:
    return ", ".join(map(repr, columns)) or "none"
