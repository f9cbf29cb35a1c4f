"""Tensors of the inference protocol as arrays: type names, shapes, and raw bytes of elements.

Every count is checked against the received data before memory is allocated.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.values.errors import InvalidArgument
from geartrain.serving.answers import TensorSpec

Array = npt.NDArray[Any]
BYTES = "BYTES"
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(bool),
    **{f"{sign}INT{bits}": np.dtype(f"{sign}int{bits}".lower()) for sign in ("", "U") for bits in (8, 16, 32, 64)},
    **{f"FP{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    BYTES: np.dtype(object),
}
"""dtype by its name in the protocol."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_DIMENSIONS = 8
_LENGTH = struct.Struct("<I")
"""Length prefix of each element of BYTES."""


def datatype_of(dtype: npt.DTypeLike) -> str:
    """Return the protocol's name of a dtype; strings are BYTES, in UTF-8."""
    found = np.dtype(dtype)
    return BYTES if found.kind in "OSU" else _NAMES[found.newbyteorder("=")]


def tensor_metadata(spec: TensorSpec) -> tuple[str, str, list[int]]:
    """Return a tensor's metadata: (name, datatype, shape with -1 for any size)."""
    return spec.name, datatype_of(spec.dtype), [-1 if size is None else size for size in spec.shape]


def checked(name: str, datatype: str, shape: Sequence[int], most_items: int) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return the dtype and shape of a request's tensor; its first dimension counts items. Raises InvalidArgument."""
    dtype = DTYPES.get(datatype)
    if dtype is None:
        raise InvalidArgument(f"input {name!r} has datatype {datatype!r}; those known here are {', '.join(DTYPES)}")
    if not 1 <= len(shape) <= _MAX_DIMENSIONS or min(shape) < 0:
        shown_shape = [*shape[: _MAX_DIMENSIONS + 1]]
        raise InvalidArgument(
            f"input {name!r} has shape {shown_shape}; it needs 1 … {_MAX_DIMENSIONS} dimensions of 0 or more, items "
            "first"
        )
    if not 1 <= shape[0] <= most_items:
        raise InvalidArgument(f"input {name!r} has {shape[0]} items; one request takes 1 … {most_items}: send several")
    return dtype, tuple(shape)


def array_of(name: str, elements: Sequence[Any] | Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return row-major elements as an array. Raises InvalidArgument if they do not fit dtype or shape.

    Floats beyond the range of ``dtype`` become infinite.
    """
    if len(elements) != math.prod(shape):
        raise InvalidArgument(
            f"input {name!r} has {len(elements)} elements where its shape {list(shape)} needs {math.prod(shape)}; gRPC "
            f"takes them in the field of {datatype_of(dtype)}"
        )
    try:
        if dtype.hasobject:
            array = np.empty(len(elements), object)
            array[:] = elements
        else:
            array = np.asarray(list(elements), dtype)  # of Python numbers: refuses integers out of range
    except (OverflowError, TypeError, ValueError) as exc:
        raise InvalidArgument(
            f"input {name!r} has an element that is no {datatype_of(dtype)}: {exc}; give its own datatype"
        ) from exc
    return array.reshape(shape)


def from_raw(name: str, data: bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return raw bytes as an array. Raises InvalidArgument if their number does not fit the shape."""
    count = math.prod(shape)
    if dtype.hasobject:
        return array_of(name, _split(name, data, count), dtype, shape)
    if len(data) != count * dtype.itemsize:
        raise InvalidArgument(
            f"input {name!r} has {len(data)} raw bytes; {datatype_of(dtype)} of shape {list(shape)} takes "
            f"{count * dtype.itemsize}"
        )
    array = np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype, copy=False).reshape(shape)
    if datatype_of(dtype) == "BOOL" and (array.view(np.uint8) > 1).any():
        raise InvalidArgument(f"input {name!r} has a BOOL that is neither 0 nor 1")
    return array


def _split(name: str, data: bytes, count: int) -> list[bytes]:
    found: list[bytes] = []
    at = 0
    while at < len(data):
        end = at + _LENGTH.size
        if end > len(data) or (end := end + _LENGTH.unpack_from(data, at)[0]) > len(data) or len(found) == count:
            raise InvalidArgument(
                f"input {name!r} of {len(data)} raw bytes does not hold {count} elements, each behind its length in 4 "
                "bytes (little-endian)"
            )
        found.append(data[at + _LENGTH.size : end])
        at = end
    return found


def elements_of(array: Array) -> list[Any]:
    """Return all elements in row-major order; strings as UTF-8."""
    flat = array.ravel().tolist()
    return list(map(_bytes, flat)) if datatype_of(array.dtype) == BYTES else flat


def to_raw(array: Array) -> bytes:
    """Return all elements in row-major order as raw bytes."""
    if datatype_of(array.dtype) == BYTES:
        elements = elements_of(array)
        return b"".join(itertools.chain.from_iterable((_LENGTH.pack(len(one)), one) for one in elements))
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()


def _bytes(element: Any) -> bytes:
    return element if isinstance(element, bytes) else str(element).encode()
