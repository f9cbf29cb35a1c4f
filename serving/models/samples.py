"""Samples of fields as requests give them, made arrays of ids: checked, texts hashed as in training.

Legend: N samples, L ids of the longest bag, a power of two, so that requests of about the same length are answered
together; :data:`PADDING` stands behind the last id of a bag.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.errors import InvalidArgument, InvalidIds
from geartrain.ams.values.specs import Ids
from geartrain.ams.values.strings import hash_strings
from geartrain.ams.values.text import quoted
from geartrain.workers.ctr.samples.click_samples import PADDING
from geartrain.workers.ctr.samples.features import HISTORY, HISTORY_ITEMS, crossed

_MOST, _LONGEST = 2**63, 10_000
_KINDS = "give an id (an integer from 0 to 2^63 - 1), a text, or a list of such"
HISTORY_OUTCOMES = "history_outcomes"


class SampleReader:
    """Reads the fields of one model. Thread-safe."""

    def __init__(self, fields: Sequence[str], history: int, single: Collection[str]) -> None:
        """``history``: latest events that count; 0: samples have none. Fields ``single`` have one id each time."""
        self.fields = tuple(fields)
        self.history = history
        self._single = frozenset(single)

    @property
    def names(self) -> tuple[str, ...]:
        """All that a sample has."""
        return (*self.fields, *([HISTORY] if self.history else []))

    def read(self, samples: Sequence[Mapping[str, Any]], names: Collection[str], who: str) -> dict[str, Ids]:
        """The ids [N, L] of each field among ``names`` of samples that have no other.

        Those of a history are those of its items and of what came of them. ``who`` says in errors what a sample is.
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
                at = next(at for at, sample in enumerate(samples) if name not in sample)
                raise InvalidArgument(
                    f"{who} {at} has no field {name!r}, which the model was trained on; give an empty list if there is "
                    "nothing"
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

    @staticmethod
    def _plain(samples: Sequence[Mapping[str, Any]], names: Collection[str]) -> dict[str, Ids] | None:
        """The ids of samples that have one in each field, as most do; None: there is more to look at."""
        if len(names) < 2 or set(map(len, samples)) != {len(names)}:
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
        """The arrays of these fields: a history of events has two."""
        of = {HISTORY: (HISTORY_ITEMS, HISTORY_OUTCOMES)} if self.history else {}
        return [part for name in names for part in of.get(name, (name,))]

    def take(self, arrays: Mapping[str, npt.NDArray[Any]], names: Collection[str], ndim: int = 2) -> dict[str, Ids]:
        """The ids [N, L] of arrays that are ids already, [N] or [N, L], of histories those of items and of outcomes.

        With ``ndim`` 3 they are [N, C] or [N, C, L]. Raises InvalidArgument.
        """
        found = {}
        shapes = "[N] or [N, L]" if ndim == 2 else "[N, C] or [N, C, L]"
        for name in self.array_names(names):
            if name not in arrays:
                raise InvalidArgument(f"there is no array {name!r}; give ids int64 {shapes}")
            array = arrays[name]
            if array.dtype.kind not in "iu" or array.ndim not in (ndim - 1, ndim) or not array.size:
                raise InvalidArgument(
                    f"array {name!r} is {array.dtype} {list(array.shape)}; it must be int64 {shapes}, and not empty"
                )
            ids = array.astype(np.int64, copy=False)
            found[name] = _widened(ids if ids.ndim == ndim else ids[..., None])
            if int(ids.min()) < PADDING:
                raise InvalidArgument(f"array {name!r} holds {ids.min()}; ids are >= 0, and {PADDING} stands for none")
            if name in self._single and (found[name].shape[-1] != 1 or int(ids.min()) < 0):
                raise InvalidArgument(f"array {name!r} must have one id for each sample; it is {list(ids.shape)}")
        return found

    def _ids(self, name: str, values: list[Any], who: str) -> Ids:
        kinds = set(map(type, values))
        if kinds == {int}:
            return _of_integers(values, lambda at: f"field {name!r} of {who} {at}")[:, None]
        if kinds == {str}:
            return _of_texts(values, lambda at: f"field {name!r} of {who} {at}")[:, None]
        bags = []
        for at, value in enumerate(values):
            where = f"field {name!r} of {who} {at}"
            items = value if isinstance(value, list) else [value]
            bags.append(_of_list(items, where, value))
            if name in self._single and len(bags[-1]) != 1:
                raise InvalidArgument(f"{where} is {quoted(value)}; it must have one id, since the model crosses it")
        return _side_by_side(bags)

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
            items.append(_of_list([event[0] for event in latest], where, events))
            outcomes.append(_of_list([event[1] for event in latest], where, events))
        return {HISTORY_ITEMS: _side_by_side(items), HISTORY_OUTCOMES: _side_by_side(outcomes)}


def with_histories(fields: Mapping[str, Ids]) -> dict[str, Ids]:
    """The fields, with the ids of events in the place of their outcomes."""
    found = dict(fields)
    if HISTORY_OUTCOMES in found:
        found[HISTORY] = crossed(found[HISTORY_ITEMS], found.pop(HISTORY_OUTCOMES))
    return found


def _of_list(items: list[Any], where: str, value: object) -> Ids:
    kinds = set(map(type, items))
    if not items:
        return np.empty(0, np.int64)
    if len(items) > _LONGEST:  # all bags of a request become as wide as its longest
        raise InvalidArgument(f"{where} has {len(items):,} entries; give at most {_LONGEST:,}, those that count most")
    if kinds == {int}:
        return _of_integers(items, lambda _: where)
    if kinds == {str}:
        return _of_texts(items, lambda _: where)
    raise InvalidArgument(f"{where} is {quoted(value)}; {_KINDS}")


def _of_integers(values: list[int], where: Callable[[int], str]) -> Ids:
    if min(values) < 0 or max(values) >= _MOST:
        at = next(at for at, value in enumerate(values) if not 0 <= value < _MOST)
        raise InvalidArgument(f"{where(at)} is {quoted(values[at])}; {_KINDS}")
    return np.array(values, np.int64)


def _of_texts(values: list[str], where: Callable[[int], str]) -> Ids:
    try:
        return hash_strings(values)
    except InvalidIds:  # a lone surrogate, which JSON can write
        at = next(at for at, text in enumerate(values) if not text.isprintable())
        raise InvalidArgument(f"{where(at)} is {quoted(values[at])}, which is no text") from None


def _side_by_side(bags: Sequence[Ids]) -> Ids:
    lengths = np.array([len(bag) for bag in bags])
    padded = np.full((len(bags), width_of(int(lengths.max()))), PADDING, np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.concatenate(bags)
    return padded


def _widened(ids: Ids) -> Ids:
    width = width_of(ids.shape[-1])
    padding = [(0, 0)] * (ids.ndim - 1) + [(0, width - ids.shape[-1])]
    return ids if width == ids.shape[-1] else np.pad(ids, padding, constant_values=PADDING)


def width_of(length: int) -> int:
    """The power of two that holds so many."""
    return 1 << (max(1, length) - 1).bit_length()


def objects_of(body: Mapping[str, Any], name: str, most: int = 1_000_000) -> list[Mapping[str, Any]]:
    """The list of objects under ``name`` of a body. Raises InvalidArgument."""
    given = body.get(name)
    if not isinstance(given, list) or not given or not all(isinstance(one, dict) for one in given):
        raise InvalidArgument(f"{name} is {quoted(given)}; it must be a list of one or more objects of fields")
    if len(given) > most:
        raise InvalidArgument(f"{name} has {len(given):,} entries; at most {most:,} are ranked at once")
    return given


def require_keys(body: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise InvalidArgument that names a key of a body that is not known."""
    known = tuple(known)
    if unknown := [name for name in body if name not in known]:
        raise InvalidArgument(f"the body has {quoted(unknown[0])}; it may have {', '.join(map(repr, known))}")


def ids_schema(names: Collection[str], *, events: bool = True) -> dict[str, Any]:
    """JSON schema of one sample."""
    one = {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string"}]}
    event = {"type": "array", "items": one, "minItems": 2, "maxItems": 2, "description": "[item, outcome]"}
    ids = {"anyOf": [*one["anyOf"], {"type": "array", "items": one}]}
    of = {name: {"type": "array", "items": event} if events and name == HISTORY else ids for name in names}
    return {"type": "object", "properties": of, "required": list(names), "additionalProperties": False}


def example_of(names: Iterable[str], first: int = 1) -> dict[str, Any]:
    """A sample, for people to see its form."""
    return {name: [[1, 1]] if name == HISTORY else first + at for at, name in enumerate(names)}
