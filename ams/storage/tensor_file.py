"""Files of named arrays in the format of safetensors: written from where the arrays lie, and mapped to be read."""

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
"""By their names in such a file."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES = 8
_ALIGNED = 64
"""Where the first array begins, in bytes: at a line of the cache."""


def tensor_file(arrays: Mapping[str, npt.NDArray[Any]], labels: Mapping[str, str]) -> list[memoryview]:
    """A file in parts: 8 bytes of length and a JSON header, then each array in the memory it lies in.

    The library would return one string of bytes, which takes two more copies of everything. As there, wide dtypes come
    first, so that every array is aligned.
    """
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    laid_out = {name: np.asarray(array, array.dtype.newbyteorder("="), order="C") for name, array in ordered}
    head, _ = tensor_head({name: (array.dtype, list(array.shape)) for name, array in laid_out.items()}, labels)
    return [memoryview(head), *(array.reshape(-1).view(np.uint8).data for array in laid_out.values())]


def tensor_head(
    arrays: Mapping[str, tuple[np.dtype, list[int]]], labels: Mapping[str, str] = MappingProxyType({})
) -> tuple[bytes, dict[str, int]]:
    """The head of a file of arrays of these dtypes and shapes, one behind the other; and where in it each begins."""
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
    """The arrays of such a file, not to be changed, mapped: processes share them, and the file may be replaced.

    ``scattered``: it is read here and there, and not all of it need fit into memory: no more is read than that.
    Raises OSError; ValueError, saying what is wrong, if the file is none.
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
