"""Arrays of a saved PyTorch state (:mod:`geartrain.bridge.rows.serialization`), read without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.storage.tensor_file import DTYPES
from geartrain.ams.values.errors import InvalidArgument

_TREE = "geartrain-state"


def state_dict_arrays(data: bytes, name: str) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of ``state[name]``, a module's ``state_dict()``, from the bytes of ``state_to_bytes(state)``;
    other values are left out. Nothing is copied: the arrays are read-only. Raises InvalidArgument.
    """
    try:
        length = int.from_bytes(data[:8], "little")
        header: Mapping[str, Any] = json.loads(data[8 : 8 + length])
        parts = _pairs(json.loads(header["__metadata__"][_TREE]))
        names = {key: part["$tensor"] for key, part in _pairs(parts[name]).items() if "$tensor" in part}
        body = memoryview(data)[8 + length :]
        return {key: _array(header[place], body) for key, place in names.items()}
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as exc:
        raise InvalidArgument(f"{len(data):,} bytes hold no state of a module {name!r}: {exc!r}") from exc


def _pairs(packed: Mapping[str, Any]) -> dict[str, Any]:
    return {str(key): value for key, value in packed["$pairs"]}


def _array(entry: Mapping[str, Any], body: memoryview) -> npt.NDArray[Any]:
    start, stop = entry["data_offsets"]
    return np.frombuffer(body[start:stop], DTYPES[entry["dtype"]]).reshape(entry["shape"])
