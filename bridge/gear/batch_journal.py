"""The journal of a gradient batcher: every call that changes it is one record, written before the call returns.

Under the prefix of the batcher: ``event/NUMBER`` (a call and its arrays) and ``state`` (everything, up to an event).
Now and then the state is written and the events before it are removed, in one transaction; so a call writes what it was
given, and the whole state only once for as many bytes of calls. Records are safetensors.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load, save

from geartrain.ams.storage.kv.store import KeyValueStore
from geartrain.ams.values.errors import InvalidArgument, StateDamaged

_FORMAT = 1
_LEAST_BYTES = 1 << 20
Arrays = dict[str, npt.NDArray[Any]]
Values = dict[str, Any]


class Journal:
    """Records in a store, under a prefix of its own. Not thread-safe, like its store."""

    def __init__(self, store: KeyValueStore, prefix: str) -> None:
        """Raises InvalidArgument unless the prefix ends with a slash."""
        if not prefix.endswith("/"):
            raise InvalidArgument(f"prefix is {prefix!r}; it must end with '/', or 'p/1' would own what 'p/10' keeps")
        self._store = store
        self._prefix = prefix
        self._next = 0
        self._event_bytes = 0
        self._state_bytes = 0
        self._events: list[str] = []

    def is_empty(self) -> bool:
        """Whether nothing was ever written under the prefix."""
        return not self._records()

    def read(self) -> tuple[tuple[Arrays, Values] | None, list[tuple[Arrays, Values]]]:
        """Return the last state (None: there is none) and the events after it, in order.

        Raises StateDamaged: a record is damaged, of another version of Geartrain, or missing.
        """
        own = self._records()
        state = None
        if "state" in own:
            self._state_bytes = len(own["state"])
            state = self._decoded("state", own.pop("state"))
            self._next = state[1]["next_event"]
        names = sorted(own)
        expected = [_event_name(self._next + place) for place in range(len(names))]
        if names != expected:
            odd = sorted(set(names) ^ set(expected))[0]
            raise StateDamaged(
                f"the gradients kept under {self._prefix!r} are not whole: {odd!r} is missing or does not belong "
                "there; give a copy of the store, or an empty one and lose the gradients that wait in it"
            )
        self._next += len(names)
        self._events = [self._prefix + name for name in names]
        self._event_bytes = sum(map(len, own.values()))
        return state, [self._decoded(name, own[name]) for name in names]

    def write(self, arrays: Arrays, values: Values) -> None:
        """Add an event. Raises StateFailed, StoreUnavailable; then it is not known whether it is there."""
        data = _encoded(arrays, values)
        key = self._prefix + _event_name(self._next)
        self._store.write({key: data})
        self._events.append(key)
        self._next += 1
        self._event_bytes += len(data)

    @property
    def is_long(self) -> bool:
        """Whether the events are longer than the state was, so that it is time for :meth:`compact`."""
        return self._event_bytes > max(_LEAST_BYTES, self._state_bytes)

    def compact(self, arrays: Arrays, values: Values) -> None:
        """Replace all events by the state that they led to. Errors as :meth:`write`."""
        data = _encoded(arrays, values | {"next_event": self._next})
        self._store.write({self._prefix + "state": data, **dict.fromkeys(self._events)})
        self._events, self._event_bytes, self._state_bytes = [], 0, len(data)

    def _records(self) -> dict[str, bytes]:
        return {
            key.removeprefix(self._prefix): value
            for key, value in self._store.read_all().items()
            if key == self._prefix + "state" or key.startswith(self._prefix + "event/")
        }

    def _decoded(self, name: str, data: bytes) -> tuple[Arrays, Values]:
        try:
            arrays = load(data)
            values = json.loads(arrays.pop("values").tobytes())
        except (SafetensorError, KeyError, ValueError) as exc:
            raise StateDamaged(f"{self._prefix + name!r} is no record of a gradient batcher: {exc}") from exc
        if values.get("format") != _FORMAT:
            raise StateDamaged(
                f"{self._prefix + name!r} is of format {values.get('format')}, this Geartrain reads {_FORMAT}"
            )
        return arrays, values


def _encoded(arrays: Arrays, values: Values) -> bytes:
    text = json.dumps(values | {"format": _FORMAT}).encode()
    packed = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    data: bytes = save(packed | {"values": np.frombuffer(text, np.uint8)})
    return data


def _event_name(number: int) -> str:
    return f"event/{number:015d}"
