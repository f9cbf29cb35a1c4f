"""Files of named arrays in the format of safetensors: written without copies, read by mapping."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

DTYPES: dict[str, np.dtype] = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
"""Numpy types by their names in a safetensors header."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES = 8
_ALIGNED = 64
"""Alignment of the first array in bytes: a cache line."""


def tensor_file(arrays: Mapping[str, npt.NDArray[Any]], labels: Mapping[str, str]) -> list[memoryview]:
    """Return a file in parts: 8 bytes of length and a JSON header, then each array without a copy.

    The safetensors library returns one string of bytes, at the cost of two copies. As there, wide dtypes come
    first, so that every array is aligned.
    """
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    laid_out = {name: np.asarray(array, array.dtype.newbyteorder("="), order="C") for name, array in ordered}
    head, _ = tensor_head({name: (array.dtype, list(array.shape)) for name, array in laid_out.items()}, labels)
    return [memoryview(head), *(array.reshape(-1).view(np.uint8).data for array in laid_out.values())]


def tensor_head(
    arrays: Mapping[str, tuple[np.dtype, list[int]]], labels: Mapping[str, str] = MappingProxyType({})
) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file of arrays of these dtypes and shapes, and the offset of each array."""
    header: dict[str, Any] = {"__metadata__": dict(labels)}
    stop = 0
    for name, (dtype, shape) in arrays.items():
        start, stop = stop, stop + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNED)
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return head, {name: len(head) + header[name]["data_offsets"][0] for name in arrays}


def map_tensors(path: Path, *, scattered: bool = False) -> dict[str, npt.NDArray[Any]]:
    """Map the arrays of a file, read-only: processes share the memory, and the file may be replaced meanwhile.

    ``scattered``: reads are random and the file may be larger than memory: nothing is read ahead.
    Raises OSError; ValueError, saying what is wrong, if it is no such file.
    """
    try:
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if scattered:
            mapped.madvise(mmap.MADV_RANDOM)
        data = np.frombuffer(mapped, np.uint8)
        begin = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES].tobytes(), "little")
        found = {}
        for name, said in json.loads(data[_LENGTH_BYTES:begin].tobytes()).items():
            if name != "__metadata__":
                start, stop = said["data_offsets"]
                found[name] = data[begin + start : begin + stop].view(DTYPES[said["dtype"]]).reshape(said["shape"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise ValueError(f"it is no file of tensors ({type(exc).__name__}: {exc})") from exc
    return found
