"""Reader of samples in requests: values of fields to arrays of ids, hashed as in training.

Legend: N samples, L ids of the longest bag, rounded up to a power of two so that requests of similar lengths are
batched; :data:`PADDING` follows the last id of a bag.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.arrays import fold_ids
from geartrain.ams.values.errors import InvalidArgument
from geartrain.ams.values.specs import Ids
from geartrain.ams.values.text import quoted
from geartrain.serving.answers import require_same_items
from geartrain.serving.kserve.datatypes import datatype_of
from geartrain.workers.ctr.samples.features import HISTORY, HISTORY_ITEMS, HISTORY_OUTCOMES, crossed
from geartrain.workers.ctr.samples.kinds import BOOLEAN, INTEGER, PADDING, TEXT, FieldKind, side_by_side, width_of

_LONGEST = 10_000
_SHOWN_ITEMS = 5
_INTEGER, _TEXT = {"type": "integer", "minimum": 0}, {"type": "string"}
_OF_FOLDED: list[dict[str, Any]] = [
    {"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
    {**_TEXT, "pattern": "^(0|-?[1-9][0-9]*)$"},
]
_FORMS: dict[str, tuple[str, Any, list[dict[str, Any]]]] = {
    INTEGER: ("int64", 1, [_INTEGER, {**_TEXT, "pattern": "^(0|[1-9][0-9]*)$"}]),
    TEXT: ("object", "text", [_TEXT]),
    BOOLEAN: ("bool", True, [{"type": "boolean"}]),
}
"""Dtype, example and JSON forms of values, by kind of field."""


class SampleReader:
    """Reads the fields of one model. Thread-safe."""

    def __init__(
        self,
        fields: Sequence[str],
        history: int,
        single: Collection[str],
        kinds: Mapping[str, FieldKind],
        shown: Mapping[str, Any],
    ) -> None:
        """``history``: number of latest events; 0: none. Fields in ``single`` have exactly one id.

        ``kinds`` are those of fields, and of the arrays of a history; ``shown`` is from :func:`read_examples`.
        """
        self._shown = shown
        self.fields = tuple(fields)
        self._kinds = kinds
        self.history = history
        self._single = frozenset(single)
        self._of_integers = frozenset(name for name in fields if kinds[name].item == INTEGER)

    def dtype(self, name: str) -> str:
        """Return the dtype of an array of :meth:`array_names`."""
        return _FORMS[self._kinds[name].item][0]

    def _forms(self, name: str) -> list[dict[str, Any]]:
        kind = self._kinds[name]
        return _OF_FOLDED if kind.fold else _FORMS[kind.item][2]

    @property
    def names(self) -> tuple[str, ...]:
        """All fields of a sample."""
        return (*self.fields, *([HISTORY] if self.history else []))

    def read(self, samples: Sequence[Mapping[str, Any]], names: Collection[str], who: str) -> dict[str, Ids]:
        """Return the ids [N, L] of each field among ``names`` of samples that have no other.

        A history gives the ids of its items and of their outcomes. ``who`` is the word for a sample in errors.
        Raises InvalidArgument that names field, sample and value.
        """
        plain = self._plain(samples, names)
        if plain is not None:
            return plain
        arrays = {}
        for name in names:
            try:
                values = [sample[name] for sample in samples]
            except KeyError:
                at, sample = next((at, sample) for at, sample in enumerate(samples) if name not in sample)
                others = [quoted(other) for other in sample if other not in names]
                instead = f", but {others[0]}, which it was not" if others else ""
                raise InvalidArgument(
                    f"{who} {at} has no field {name!r}, which the model was trained on{instead}; give an empty list if "
                    "there is nothing"
                ) from None
            if name == HISTORY and self.history:
                arrays.update(self._histories(values, who))
            else:
                arrays[name] = self._ids(name, values, who)
        for at, sample in enumerate(samples):
            if len(sample) > len(names):
                unknown = next(name for name in sample if name not in names)
                raise InvalidArgument(
                    f"{who} {at} has a field {quoted(unknown)}; a {who} has {', '.join(map(repr, names))}"
                )
        return arrays

    def _plain(self, samples: Sequence[Mapping[str, Any]], names: Collection[str]) -> dict[str, Ids] | None:
        """Return the ids of samples with one integer in each field, the common case; None otherwise."""
        if len(names) < 2 or not self._of_integers.issuperset(names) or set(map(len, samples)) != {len(names)}:
            return None
        try:
            values = list(chain.from_iterable(map(itemgetter(*names), samples)))
            if set(map(type, values)) != {int}:
                return None
            ids = np.array(values, np.int64).reshape(len(samples), -1).T.copy()
        except (KeyError, OverflowError):
            return None
        return None if int(ids.min()) < 0 else dict(zip(names, ids[:, :, None], strict=True))

    def array_names(self, names: Collection[str]) -> list[str]:
        """Return the arrays of these fields: a history of events has two."""
        of = {HISTORY: (HISTORY_ITEMS, HISTORY_OUTCOMES)} if self.history else {}
        return [part for name in names for part in of.get(name, (name,))]

    def ids_of(self, arrays: Mapping[str, npt.NDArray[Any]], names: Collection[str], ndim: int = 2) -> dict[str, Ids]:
        """Return the ids [N, L] of arrays of values, [N] or [N, L]; of histories those of items and of outcomes.

        :data:`PADDING` follows the end of a list, of texts "". In a folded field -1 is a value: its lists of several
        lengths are decimal texts. With ``ndim`` 3 the arrays are [N, C] or [N, C, L].
        Raises InvalidArgument.
        """
        found = {}
        shapes = "[N] or [N, L]" if ndim == 2 else "[N, C] or [N, C, L]"
        for name in self.array_names(names):
            if name not in arrays:
                raise InvalidArgument(f"there is no array {name!r}; give {datatype_of(self.dtype(name))} {shapes}")
            array, kind = arrays[name], self._kinds[name]
            if array.dtype.kind not in "iubO" or array.ndim not in (ndim - 1, ndim) or not array.size:
                raise InvalidArgument(
                    f"array {name!r} is {array.dtype} {list(array.shape)}; it must be "
                    f"{datatype_of(self.dtype(name))} {shapes}, and not empty"
                )
            if array.ndim == ndim and array.shape[-1] != 1:
                kind.require_lists(f"array {name!r}", list(array.shape))
            ids = _ids_of(array, kind, f"array {name!r}")
            found[name] = _widened(ids if ids.ndim == ndim else ids[..., None])
            if name in self._single and (found[name].shape[-1] != 1 or int(ids.min()) < 0):
                raise InvalidArgument(f"array {name!r} must have one id for each sample; it is {list(ids.shape)}")
        require_same_items(found)
        return found

    def _ids(self, name: str, values: list[Any], who: str) -> Ids:
        def where(at: int) -> str:
            return f"field {name!r} of {who} {at}"

        for at, value in enumerate(values):
            if isinstance(value, list) and len(value) > _LONGEST:  # all bags of a request become as wide as its longest
                raise InvalidArgument(
                    f"{where(at)} has {len(value):,} entries; give at most {_LONGEST:,}, those that count most"
                )
            if isinstance(value, list) and name in self._single and len(value) != 1:
                raise InvalidArgument(
                    f"{where(at)} is {quoted(value)}; it must have one id, since the model crosses it"
                )
        return self._kinds[name].bags(values, where)

    def _histories(self, values: list[Any], who: str) -> dict[str, Ids]:
        items, outcomes = [], []
        for at, events in enumerate(values):
            where = f"field {HISTORY!r} of {who} {at}"
            if not isinstance(events, list) or not all(isinstance(one, list) and len(one) == 2 for one in events):
                raise InvalidArgument(
                    f"{where} is {quoted(events)}; it must be a list of events [item, outcome], the oldest first, such "
                    "as [[7, 1]]; an empty one if nothing happened"
                )
            latest = events[-self.history :]
            items.append(self._of_events(HISTORY_ITEMS, [event[0] for event in latest], where))
            outcomes.append(self._of_events(HISTORY_OUTCOMES, [event[1] for event in latest], where))
        return {HISTORY_ITEMS: side_by_side(items), HISTORY_OUTCOMES: side_by_side(outcomes)}

    def _of_events(self, name: str, values: list[Any], where: str) -> Ids:
        return self._kinds[name].ids(values, lambda _: f"one of {name} in {where}")

    def schema(self, names: Collection[str]) -> dict[str, Any]:
        """Return the JSON schema of one sample."""
        of = {name: self._schema(name) for name in names}
        return {"type": "object", "properties": of, "required": list(names), "additionalProperties": False}

    def _schema(self, name: str) -> dict[str, Any]:
        if name == HISTORY and self.history:
            parts = [{"anyOf": self._forms(part)} for part in self.array_names([HISTORY])]
            event = {"type": "array", "prefixItems": parts, "minItems": 2, "maxItems": 2}
            return {"type": "array", "items": {**event, "description": "[item, outcome]"}}
        kind = self._kinds[name]
        one = self._forms(name)
        one = [*one, {"type": "null"}] if kind.fill is not None else one
        some = {"items": {"anyOf": one}} if kind.is_list else {"maxItems": 0}
        choices = self._choices(name)
        return {"anyOf": [*one, {"type": "array", **some}], **({"x-choices": choices} if choices else {})}

    def _choices(self, name: str) -> list[dict[str, Any]]:
        """Return values for a person to choose from: ``value``; of an item also its ``title`` and its ``others``."""
        if name != self._shown.get("item"):
            return [{"value": value} for value in self._shown.get("choices", {}).get(name, ())]
        return [
            {
                "value": one[name],
                **({"title": title} if (title := self._shown["titles"].get(str(one[name]))) else {}),
                **({"others": others} if (others := {key: one[key] for key in one if key != name}) else {}),
            }
            for one in self._shown["items"]
        ]

    def examples(self, names: Collection[str]) -> list[dict[str, Any]]:
        """Return example samples: some of the training if available, or one that shows the form."""
        shown = [one for one in self._shown.get("samples", ()) if any(name in one for name in names)]
        return [self._filled(one, names) for one in shown] or [{name: self._form(name) for name in names}]

    def candidates(self, names: Collection[str]) -> list[dict[str, Any]]:
        """Return example candidates, as :meth:`examples`, of several items."""
        shown = self._shown.get("items", ())[:_SHOWN_ITEMS]
        return [self._filled(one, names) for one in shown] or [{name: self._form(name) for name in names}] * 2

    def _filled(self, shown: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """Return a sample with missing fields filled: empty, or a placeholder text or number."""
        blank = {name: self._form(name) if name in self._single else [] for name in names}
        return {name: shown.get(name, blank[name]) for name in names}

    def _form(self, name: str) -> Any:
        parts = [_FORMS[self._kinds[part].item][1] for part in self.array_names([name])]
        return [parts] if len(parts) > 1 else parts[0]


def with_histories(fields: Mapping[str, Ids], history: int) -> dict[str, Ids]:
    """Return the fields, with the ids of events in place of their outcomes if the model reads a ``history``."""
    found = dict(fields)
    if history and HISTORY_OUTCOMES in found:
        found[HISTORY] = crossed(found[HISTORY_ITEMS], found.pop(HISTORY_OUTCOMES))
    return found


def _ids_of(array: npt.NDArray[Any], kind: FieldKind, where: str) -> Ids:
    """Return the ids of an array of values, of its shape; :data:`PADDING`, in lists of texts "", stays."""
    is_integer = array.dtype.kind in "iu"
    if is_integer and kind.fold:
        return np.asarray(fold_ids(array))
    if is_integer and kind.item == INTEGER and int(array.min()) >= PADDING and int(array.max()) < 2**63:
        return array.astype(np.int64, copy=False)
    is_there = np.ones(array.shape, np.bool_)
    if is_integer or kind.is_list:
        is_there = array != (PADDING if is_integer else b"")
    ids = np.full(array.shape, PADDING, np.int64)
    ids[is_there] = kind.ids(array[is_there].tolist(), lambda _: f"a value of {where}")
    return ids


def _widened(ids: Ids) -> Ids:
    width = width_of(ids.shape[-1])
    padding = [(0, 0)] * (ids.ndim - 1) + [(0, width - ids.shape[-1])]
    return ids if width == ids.shape[-1] else np.pad(ids, padding, constant_values=PADDING)


def objects_of(body: Mapping[str, Any], name: str, most: int = 1_000_000) -> list[Mapping[str, Any]]:
    """Return the list of objects under ``name`` of a body. Raises InvalidArgument."""
    given = body.get(name)
    if not isinstance(given, list) or not given or not all(isinstance(one, dict) for one in given):
        raise InvalidArgument(f"{name} is {quoted(given)}; it must be a list of one or more objects of fields")
    if len(given) > most:
        raise InvalidArgument(f"{name} has {len(given):,} entries; at most {most:,} are ranked at once")
    return given


def require_keys(body: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise InvalidArgument that names an unknown key of a body."""
    known = tuple(known)
    if unknown := [name for name in body if name not in known]:
        raise InvalidArgument(f"the body has {quoted(unknown[0])}; it may have {', '.join(map(repr, known))}")
