"""Arrays in one file behind a head that describes them: checked as a whole, replaced in one step.

The XXH3 of the rest (8 bytes), the length of the head (8 bytes, little-endian), the head (JSON), the arrays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from geartrain.ams.storage.durable import sync_folder, write_file
from geartrain.ams.values.errors import StateDamaged, StateFailed

if TYPE_CHECKING:
    from typing_extensions import Buffer

Arrays = Mapping[str, npt.NDArray[Any]]
_SUM_BYTES = _LENGTH_BYTES = 8


def write_arrays(path: Path, head: Mapping[str, Any], arrays: Arrays, remedy: str) -> None:
    """Replace the content of the file. Raises StateFailed, with the ``remedy``; then the file is unchanged."""
    shapes = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    text = json.dumps({**head, "arrays": shapes}, sort_keys=True).encode()
    text += b" " * (-len(text) % 8)  # what follows is aligned in memory
    body: list[Buffer] = [len(text).to_bytes(_LENGTH_BYTES, "little"), text]
    body += [np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays.values()]
    seen = xxhash.xxh3_64()
    for piece in body:
        seen.update(piece)
    try:
        write_file(path, seen.digest(), *body)
        sync_folder(path.parent)
    except OSError as exc:
        raise StateFailed(f"{path} could not be written: {exc.strerror}; {remedy}") from exc


def read_head(path: Path) -> dict[str, Any]:
    """Return the head, unchecked. Raises OSError, StateDamaged."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_SUM_BYTES + _LENGTH_BYTES)[_SUM_BYTES:], "little")
        text = file.read(min(length, path.stat().st_size))
    try:
        head: dict[str, Any] = json.loads(text)
    except ValueError as exc:
        raise StateDamaged(f"{path} is damaged") from exc
    return head


def read_arrays(path: Path) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Return the head and the arrays, read-only. Raises OSError; StateDamaged, naming the file."""
    data = path.read_bytes()
    body = memoryview(data)[_SUM_BYTES:]
    if len(body) < _LENGTH_BYTES or xxhash.xxh3_64(body).digest() != data[:_SUM_BYTES]:
        raise StateDamaged(f"{path} is damaged (its checksum is another)")
    at = _LENGTH_BYTES + int.from_bytes(body[:_LENGTH_BYTES], "little")
    head = json.loads(bytes(body[_LENGTH_BYTES:at]))
    arrays = {}
    for name, dtype, shape in head["arrays"]:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays[name] = np.frombuffer(body[at : at + size], dtype).reshape(shape)
        at += size
    return head, arrays
