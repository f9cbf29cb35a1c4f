"""Click samples in one's own files, Parquet, CSV or sample trees: a column for each field, and ``click``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from geartrain.ams.values.errors import ColumnMismatch, ConfigError, SourceDamaged, SourceNotFound
from geartrain.ams.values.specs import Ids
from geartrain.ams.values.strings import hash_strings
from geartrain.workers.ctr.samples.click_samples import PADDING, TITLES, USER, ClickSamples, SampleSchema
from geartrain.workers.ctr.samples.kinds import ID_OF_MISSING, INTEGER, FieldKind
from geartrain.workers.ctr.samples.settings import ITEMS, PLAIN_FILES, FeatureSettings, FileSettings
from geartrain.workers.samples.batches import Values
from geartrain.workers.samples.columns import (
    AS_TRAINED,
    IN_THE_FILE,
    IN_THE_RECIPE,
    MISSING,
    ColumnType,
    planned_columns,
    remedies,
    require_column,
    says_fold,
    type_named,
    type_of,
)
from geartrain.workers.samples.csv_lines import CsvRows
from geartrain.workers.samples.opening import open_rows
from geartrain.workers.samples.rows import ChangedRows, Rows, SampleRows, column_of_bags, ids_of_booleans
from geartrain.workers.samples.source import SampleSource

CLICK, TIME, ITEM = "click", "time", "item"
_READ_FOR_WORDS, _MAX_WORDS = 200_000, 20_000
_NAME_OF = {item: name for name, item in ITEMS.items()}


class OwnSamples:
    """Samples in files, read part by part: a :class:`~geartrain.workers.samples.source.SampleSource`.

    ``click`` is 0 or 1, ``time`` (optional) is a timestamp or Unix seconds; neither may be missing. Every other column
    is a field: integers are ids, texts are hashed, lists of either are bags; a missing value has its
    :data:`ID_OF_MISSING`. ``item`` and names that begin with ``item_`` are fields of the item, all others of the user
    and the moment.
    """

    def __init__(
        self,
        place: str,
        *,
        clicks: bool = True,
        times: bool = True,
        kinds: Mapping[str, FieldKind] | None = None,
        fold: Sequence[str] = (),
        features: Mapping[str, FeatureSettings] | None = None,
        files: FileSettings = PLAIN_FILES,
    ) -> None:
        """Find the files, and determine the types of their columns.

        Args:
            place: A file, a folder, a pattern or a URL.
            clicks: Whether ``click`` is read; otherwise all clicks are 0.
            times: Whether ``time`` is read if there is one.
            kinds: Kinds of a trained model's fields: CSV is read by them, values of another kind in Parquet are
            converted
                where that is exact, further columns are ignored, and they say which fields are folded.
            fold: Fields of any 64-bit integers, mapped to ids by ``gt.fold_ids``.
            features: A recipe's settings of fields.
            files: Format of CSV.

        Raises SourceError that names file, column and row; ConfigError without any field.
        """
        in_files = IN_THE_FILE if kinds is None else AS_TRAINED
        self.place, self._remedies = place, in_files if features is None else IN_THE_RECIPE
        self._files = files
        settings = features or {}
        with remedies(self._remedies):
            self._source = source = open_rows(place, **asdict(files))
            found = [name for name in source.columns if name not in (CLICK, TIME)]
            names = [name for name in kinds or found if name not in settings or settings[name].kind != "none"]
            self._require_columns(names, found, clicks, kinds, [*fold, *settings])
            if clicks and not any(source.part_rows):
                raise SourceNotFound(f"{place} holds no samples; give a file with a row for each")
            others = [name for name in (CLICK, TIME) if name in source.columns and (clicks if name == CLICK else times)]
            types = {
                name: self._type_of(name, (kinds or {}).get(name), settings.get(name), fold)
                for name in [*others, *names]
            }
            self.kinds = {
                name: (kinds or {}).get(name) or self._kind_of(name, types[name], fold, settings.get(name))
                for name in names
            }
            self._plan(types)
        self.fields, self.images, self.schema = tuple(names), None, schema_of(self.kinds)
        self.part_rows, self.identity = source.part_rows, source.identity
        self._starts = np.cumsum([0, *self.part_rows])

    def _require_columns(
        self, names: list[str], found: list[str], clicks: bool, kinds: object, said: Sequence[str]
    ) -> None:
        place, columns = self.place, ", ".join(map(repr, found)) or "none"
        if lacking := [name for name in names if name not in self._source.schema.names]:
            raise ColumnMismatch(
                f"{place} has no column {lacking[0]!r}, which the model was trained on; it has {columns}"
            )
        if clicks and CLICK not in self._source.columns:
            raise ColumnMismatch(
                f"{place} has no column {CLICK!r}, which says by 0 or 1 what was clicked; it has {columns}"
            )
        if not kinds and (unknown := [name for name in said if name not in found]):
            what = "features name" if self._remedies is IN_THE_RECIPE else "fold names"
            raise ConfigError(f"{what} {unknown[0]!r}, which is no field of {place}; it has {columns}")
        if not names:
            raise ConfigError(f"{place} has no column beside {CLICK} and {TIME}; give it fields: user, item, …")

    def _type_of(
        self, name: str, kind: FieldKind | None, said: FeatureSettings | None, fold: Sequence[str]
    ) -> ColumnType:
        """Return the type to read a column as: the stated one; the field's, for CSV and for types that samples do not
        have; integers if the time is a moment.
        """
        schema = self._source.schema
        require_column(name, schema.names, self.place)
        if said is not None and said.kind is not None:
            return type_named(name, said.kind)
        arrow = schema.field(name).type
        if type_of(arrow) is None and name == TIME:
            return ColumnType("int64")
        if kind is not None and (type_of(arrow) is None or isinstance(self._source, CsvRows)):
            return ColumnType(_NAME_OF[kind.item], is_list=kind.is_list)
        folds = [name] if name in fold or (said is not None and said.hash == "fold") else []
        return planned_columns([name], schema, self.place, True, {}, folds).types[name]

    def _kind_of(self, name: str, found: ColumnType, fold: Sequence[str], said: FeatureSettings | None) -> FieldKind:
        if found.item not in ITEMS:
            raise ColumnMismatch(
                f"column {name!r} of {self.place} holds numbers with fractions, and fields are ids; cut them into "
                f"buckets, or {self._remedies.without.format(name=name)}"
            )
        item, is_folded = ITEMS[found.item], name in fold or (said is not None and said.hash == "fold")
        if is_folded and item != INTEGER:
            raise ConfigError(f"fold names {name!r}, and that column of {self.place} is {found}; leave it out there")
        return FieldKind(item=item, is_list=found.is_list, fill=ID_OF_MISSING[item], fold=is_folded)

    def _plan(self, types: Mapping[str, ColumnType]) -> None:
        for name in (CLICK, TIME):
            found = types.get(name)
            if found is not None and (found.item == "string" or found.is_list):
                what = "lists; it must hold one number a sample" if found.is_list else "texts; it must hold numbers"
                raise ColumnMismatch(f"column {name!r} of {self.place} holds {what}")
        kinds = self.kinds
        self._others = [name for name, kind in kinds.items() if not _is_read(types[name], kind)]
        """Columns of another kind than their field's."""
        own = [name for name in kinds if name not in self._others]
        self._texts = {name: str(types[name]) for name in own if types[name].item == "string"}
        self._booleans = [name for name in own if types[name].item == "bool"]
        numbers = [name for name in own if kinds[name].fill == PADDING and name not in self._booleans]
        self._source.plan(
            {name: str(kind) for name, kind in types.items()},
            {name: 0 if name in own else None for name in kinds if types[name].item == "string"},
            {**dict.fromkeys(numbers, PADDING), **dict.fromkeys([*self._others, *self._booleans], MISSING)},
            [name for name in own if kinds[name].fold],
        )

    def read(self, part: int) -> Rows:
        """Return the rows of a part; slices of them are checked.

        A slice raises SourceDamaged also for an invalid id or click, and InvalidArgument for a value of another kind.
        """
        with remedies(self._remedies):
            rows = self._source.read(part)
        return ChangedRows(rows.num_rows, partial(self._checked, part, rows))

    def _checked(self, part: int, rows: Rows, first: int, end: int) -> SampleRows:
        with remedies(self._remedies):
            found, start = rows.slice(first, end - first), self._starts[part] + first
            for name in self._booleans:
                found = found.map_column(name, partial(ids_of_booleans, missing=PADDING))
            for name in self._others:
                found = found.map_column(name, partial(self._converted, start, name))
            for name, values, places in found.columns():
                if name == TIME:
                    self._require_times(start, found.column(TIME))
                else:
                    where = lambda row: f"{self.place}, sample {start + row}"  # noqa: E731
                    require_values(name, self.kinds.get(name), values, where, places)
        return found

    def _converted(self, start: int, name: str, column: Any) -> Any:
        """Return a column converted to the field's kind."""
        kind = self.kinds[name]
        values = column.to_pylist()
        ids = kind.bags(values, lambda at: f"{self.place}, sample {start + at}: {name}") if values else np.empty((0, 1))
        offsets = np.arange(len(ids) + 1) * ids.shape[1]
        return column_of_bags(ids.reshape(-1).astype(np.int64), offsets if kind.is_list else None)

    def features(self, said: Mapping[str, FeatureSettings]) -> dict[str, FeatureSettings]:
        """Return the fields' settings: those in ``said``, completed by the types that were found."""
        return {
            **said,
            **{
                name: replace(
                    said.get(name, FeatureSettings()),
                    kind=str(ColumnType(_NAME_OF[kind.item], is_list=kind.is_list)),
                    hash="fold" if kind.fold else None,
                )
                for name, kind in self.kinds.items()
            },
        }

    def times(self, part: int) -> Ids:
        """Read only the times of a part's samples; return them in whole seconds. Raises ConfigError without times."""
        with remedies(IN_THE_FILE):  # recipes have no settings of the time
            found = self._times.read(part).slice(0, self.part_rows[part]).column(TIME)
        self._require_times(self._starts[part], found)
        return found if found.dtype == np.int64 else np.floor(found).astype(np.int64)

    def _require_times(self, start: int, times: npt.NDArray[Any]) -> None:
        bad = np.flatnonzero(~np.isfinite(times))
        if len(bad):
            raise SourceDamaged(
                f"{self.place}, sample {start + bad[0]}: time is {times[bad[0]]}; write the time there, or leave the "
                "row out"
            )

    @cached_property
    def _times(self) -> SampleSource:
        if TIME not in self._source.columns:
            raise ConfigError("split is 'time', but the samples have no times; give them a column time, or take random")
        found = type_of(self._source.schema.field(TIME).type)
        has_fractions = found is not None and str(found) in ("float32", "float64")
        return open_rows(self.place, **asdict(self._files)).plan(
            {TIME: "float64" if has_fractions else "int64"}, None, {}
        )

    def in_memory(self) -> ClickSamples:
        """Return all samples."""
        return self.gathered([self.read(part).slice(0, count) for part, count in enumerate(self.part_rows)])

    def gathered(self, rows: Sequence[SampleRows]) -> ClickSamples:
        """Return the samples of ``rows``, in memory."""
        batches = [some.batch({}) for some in rows]
        columns: dict[str, npt.NDArray[Any]] = {}
        for name in [*self.kinds, CLICK, TIME]:
            parts = [
                array if (level := batch.level_of.get(name)) is None else array[batch.index[level].numpy()]
                for batch in batches
                if name in batch
                for array in [_array(batch[name])]
            ]
            if parts or name in self.kinds:
                columns[name] = _joined(parts, name in self.kinds and self.kinds[name].is_list)
        count = sum(some.num_rows for some in rows)
        clicked, times = columns.pop(CLICK, np.zeros(count)), columns.pop(TIME, None)
        return ClickSamples(
            fields=columns,
            clicks=clicked.astype(np.float32),
            times=None if times is None else times.astype(np.int64),
            schema=self.schema,
            words=(words := self._words()),
            titles=_titles_of(columns, words),
        )

    def _words(self) -> dict[int, str]:
        """Return texts of ids, from the first parts, for columns with few different ones."""
        if not self._texts:
            return {}
        source = open_rows(self.place, **asdict(self._files))
        source.plan(self._texts, dict.fromkeys(self._texts), dict.fromkeys(self._texts, MISSING))
        found: dict[str, set[str]] = {name: set() for name in self._texts}
        for part, rows in enumerate(np.cumsum(source.part_rows).tolist()):
            read = source.read(part).slice(0, _READ_FOR_WORDS)
            for name, texts in found.items():
                texts.update(read.texts(name))
            if rows >= _READ_FOR_WORDS:
                break
        words = sorted(set().union(*(texts for texts in found.values() if len(texts) <= _MAX_WORDS)))
        return dict(zip(hash_strings(words).tolist(), words, strict=True))


def schema_of(kinds: Mapping[str, FieldKind]) -> SampleSchema:
    """Return the schema, by the fields' names."""
    item = (ITEM, *(name for name in kinds if name.startswith(f"{ITEM}_"))) if ITEM in kinds else ()
    has_users = USER in kinds and not any(kinds[name].is_list for name in (USER, *item[:1])) and bool(item)
    return SampleSchema(item=item, user=USER if has_users else None, kinds=kinds)


def require_values(
    name: str, kind: FieldKind | None, values: Values, where: Callable[[int], str], places: Any = None
) -> None:
    """Raise SourceDamaged for an invalid id, or without a ``kind`` an invalid click.

    ``where`` names a row; for values by node, ``places`` are the nodes of the rows.
    """
    items, offsets = values if isinstance(values, tuple) else (values, None)
    array: npt.NDArray[Any] = items.numpy()
    if kind is None:
        bad, what = (array != 0) & (array != 1), "it must be 0 or 1"
    else:
        bad, what = array < (PADDING if kind.fill == PADDING else 0), f"ids are >= 0{says_fold(name)}"
    if not bad.any():
        return
    found = np.flatnonzero(bad.reshape(-1))
    rows = found // array[0].size if offsets is None else np.searchsorted(offsets.numpy(), found, side="right") - 1
    if places is not None:  # nodes of other samples may be bad
        is_of_these = np.isin(rows, places)
        found, rows = found[is_of_these], rows[is_of_these]
    if len(found):
        row = int(rows[0]) if places is None else int(np.flatnonzero(places == rows[0])[0])
        raise SourceDamaged(f"{where(row)}: {name} is {array.reshape(-1)[found[0]]}; {what}")


def _titles_of(columns: Mapping[str, npt.NDArray[np.int64]], words: Mapping[int, str]) -> dict[int, str]:
    """Return the items' titles, if there is a column of them; an item with several titles has none."""
    name = next((name for name in TITLES if name in columns and columns[name].ndim == 1), None)
    if name is None or ITEM not in columns or columns[ITEM].ndim > 1:
        return {}
    pairs = np.unique(np.stack([columns[ITEM], columns[name]]), axis=1)
    _, first, times = np.unique(pairs[0], return_index=True, return_counts=True)
    return {item: words[title] for item, title in pairs[:, first[times == 1]].T.tolist() if words.get(title)}


def _is_read(found: ColumnType, kind: FieldKind) -> bool:
    """Return whether a column is read without conversion."""
    return ITEMS.get(found.item) == kind.item and kind.is_list >= found.is_list


def _array(values: Values) -> npt.NDArray[Any]:
    """Return values as an array [B], or [B, L] for bags."""
    if isinstance(values, Tensor):
        return values.numpy()
    items, offsets = (part.numpy() for part in values)
    lengths = np.diff(offsets)
    bags = np.full((len(lengths), max(int(lengths.max(initial=0)), 1)), PADDING, np.int64)
    bags[np.arange(bags.shape[1]) < lengths[:, None]] = items
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
