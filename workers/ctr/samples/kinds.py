"""Kinds of the fields' values: read in training, kept with the model, and required of its requests.

Without torch: a service reads samples by it, too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from geartrain.ams.values.arrays import ID_BITS
from geartrain.ams.values.errors import ConfigError, InvalidArgument, InvalidIds
from geartrain.ams.values.specs import Ids
from geartrain.ams.values.strings import hash_strings
from geartrain.ams.values.text import quoted

PADDING = -1
"""Marker for no id."""
INTEGER, TEXT, BOOLEAN = "integer", "text", "boolean"
ID_OF_MISSING: Mapping[str, int] = {INTEGER: PADDING, BOOLEAN: PADDING, TEXT: int(hash_strings([""])[0])}
"""Id of a missing value in one's own samples: for numbers none, for texts that of the empty text."""
_HASH = "xxh3, 63 bits"
"""Name of the hash from texts to ids: ``hash_strings``."""
_DECIMAL = re.compile("0|[1-9][0-9]{0,18}")
_SIGNED = re.compile("-?[1-9][0-9]{0,19}|0")
_OF_FOLDED = "give an integer from -2^63 to 2^64 - 1, as a number or as its decimal digits"
_PLURALS = {INTEGER: "integers", TEXT: "texts", BOOLEAN: "true and false"}
_REMEDIES = {
    INTEGER: "give an integer from 0 to 2^63 - 1, as a number or as its decimal digits",
    TEXT: "give the text as it was in training, a number as '7'",
    BOOLEAN: "give true or false",
}


@dataclass(frozen=True, kw_only=True)
class FieldKind:
    """Kind of a field's values: integers, which are ids, texts, which are hashed, or booleans, with ids 0 and 1."""

    item: str
    is_list: bool = False
    """Whether a sample has a list of values; a single value is then a list of one."""
    fill: int | None = None
    """Id of a missing value; None: values must not be missing."""
    fold: bool = False
    """Whether integers are any 64-bit values, mapped to ids by ``gt.fold_ids``; -1 is such a value then."""

    def to_json(self) -> dict[str, Any]:
        """Return the kind as plain values."""
        return {**asdict(self), "hash": _HASH if self.item == TEXT else None}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> FieldKind:
        """Return the kind of :meth:`to_json`'s values. Raises ConfigError for a kind, or a hash, of another version."""
        kind = cls(**{name: values.get(name) for name in ("item", "is_list", "fill", "fold")})  # type: ignore[arg-type]
        if kind.item not in _PLURALS or kind.to_json() != values:
            raise ConfigError(f"the values of a field are {quoted(values)}; use the version that trained the model")
        return kind

    def ids(self, values: Sequence[Any], where: Callable[[int], str]) -> Ids:
        """Return the ids [N] of N values, of JSON, numpy or Parquet; bytes are texts.

        An integer may be given in decimal digits, a boolean as 0 or 1; nothing else is converted. ``where`` names a
        value by its place. Raises InvalidArgument that names the first value of another kind.
        """
        types = set(map(type, values))
        if types == {int} and self.item == INTEGER and min(values) >= 0 and max(values) < 2**63:
            return np.array(values, np.int64)
        if types and types <= {str, bytes} and self.item == TEXT:
            with suppress(InvalidIds):
                return hash_strings(values)
        found = [self._id(value) for value in values]
        if None in found:
            at = found.index(None)
            remedy = _OF_FOLDED if self.fold else _REMEDIES[self.item]
            raise InvalidArgument(
                f"{where(at)} is {quoted(_text(values[at]))}; the model was trained on {self} there: {remedy}"
            )
        return np.array(found, np.int64)

    def __str__(self) -> str:
        return f"lists of {_PLURALS[self.item]}" if self.is_list else _PLURALS[self.item]

    def bags(self, values: Sequence[Any], where: Callable[[int], str]) -> Ids:
        """Return the ids [N, L] of N samples' values, each one value or a list; an empty list has no ids.

        Raises InvalidArgument, also for a list where training had single values.
        """
        if self.is_list:
            values = [[] if value is None else value for value in values]
        if not any(isinstance(value, list) for value in values):
            return self.ids(values, where)[:, None]
        bags = []
        for at, value in enumerate(values):
            if isinstance(value, list) and value:
                self.require_lists(where(at), value)
            bags.append(self.ids(value if isinstance(value, list) else [value], lambda _, at=at: where(at)))  # type: ignore[misc]
        return side_by_side(bags)

    def require_lists(self, where: str, value: object) -> None:
        """Raise InvalidArgument for the list ``value`` if training had single values."""
        if not self.is_list:
            raise InvalidArgument(
                f"{where} is {quoted(value)}; the model was trained on single {self} there: give one without a list, "
                "an empty list if there is nothing"
            )

    def _id(self, value: object) -> int | None:
        """Return the id of a value; None: it is of another kind."""
        if isinstance(value, str | bytes) and self.item == TEXT:
            with suppress(InvalidIds):  # a lone surrogate, which JSON can write
                return int(hash_strings([value])[0])
            return None
        if value is None:
            return self.fill
        if self.item == BOOLEAN:
            return int(value) if isinstance(value, int) and (value in (0, 1) or value == self.fill) else None
        if self.item == TEXT or isinstance(value, bool):
            return None
        if isinstance(value, str | bytes):
            value = int(value) if (_SIGNED if self.fold else _DECIMAL).fullmatch(_text(value)) else None
        if self.fold:
            return value & ID_BITS if isinstance(value, int) and -(2**63) <= value < 2**64 else None
        return value if isinstance(value, int) and (0 <= value < 2**63 or value == self.fill) else None


def kinds_from_json(said: Mapping[str, Any]) -> dict[str, FieldKind]:
    """Return the kinds by field. Raises ConfigError."""
    return {name: FieldKind.from_json(values) for name, values in said.items()}


def kinds_to_json(kinds: Mapping[str, FieldKind]) -> dict[str, Any]:
    """Return the kinds as plain values."""
    return {name: kind.to_json() for name, kind in kinds.items()}


def side_by_side(bags: Sequence[Ids]) -> Ids:
    """Return the ids [N, L] of N lists, each followed by padding; L is a power of two."""
    lengths = np.array([len(bag) for bag in bags])
    padded = np.full((len(bags), width_of(int(lengths.max()))), PADDING, np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.concatenate(bags)
    return padded


def width_of(length: int) -> int:
    """Return the least power of two >= ``length``."""
    return 1 << (max(1, length) - 1).bit_length()


def _text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
