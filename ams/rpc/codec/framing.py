"""Fast encoding of raw bytes: a small protobuf header followed by one or two ``bytes`` fields.

Such a field is encoded by hand (tag, length, bytes) straight from the array and read back as a view, so that rows are
copied once per side instead of three times. The message is plain protobuf: stubs in any language read and write it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from geartrain.ams.kernels import ops
from geartrain.ams.values.errors import InvalidRows, ProtocolError
from geartrain.ams.values.specs import Ids

PADDING_FIELD, FIRST_RAW_FIELD, LAST_RAW_FIELD = 13, 14, 15
_ALIGNMENT = 8
_LENGTH_DELIMITED = 2
_FIXED64 = struct.Struct("<BQ")

M = TypeVar("M", bound=Message)


def encode_framed(header: Message, raw: Iterable[tuple[int, npt.NDArray[Any]]]) -> bytes:
    """Encode ``header`` followed by the raw fields (number, C-contiguous array), each at an aligned offset."""
    head = header.SerializeToString()
    parts: list[Any] = [head]
    size = len(head)
    for number, array in raw:
        prefix = _tag(number) + _varint(array.nbytes)
        prefix = _padding(size + len(prefix)) + prefix
        parts += (prefix, array.reshape(-1).view(np.uint8).data)
        size += len(prefix) + array.nbytes
    return b"".join(parts)


class ReplyRoom:
    """Buffer of a message with rows [num_rows, dim] (the last raw field) and a fixed64.

    Saves a large reply one copy: the shard writes its rows into the message.
    """

    def __init__(self, num_rows: int, dim: int, dtype: np.dtype[Any]) -> None:
        num_bytes = num_rows * dim * dtype.itemsize
        prefix = _tag(LAST_RAW_FIELD) + _varint(num_bytes)
        self.data, room = ops.alloc_bytes(_padding(len(prefix)) + prefix, num_bytes + _FIXED64.size)
        """Message, complete once all of it is written."""
        self.rows: npt.NDArray[Any] = room[:num_bytes].view(dtype).reshape(num_rows, dim)
        """View of the rows in the message."""
        self._tail = room[num_bytes:]

    def write_field(self, number: int, value: int) -> None:
        """Write the field ``number``."""
        self._tail[:] = np.frombuffer(_FIXED64.pack(number << 3 | 1, value), np.uint8)


def decode_framed(data: bytes, kind: type[M]) -> tuple[M, dict[int, memoryview]]:
    """Split an encoded message into its header and views of its raw fields. Raises ProtocolError."""
    view = memoryview(data)
    raw: dict[int, memoryview] = {}
    head: list[memoryview] = []
    position, end = 0, len(data)
    while position < end:
        start = position
        tag, position = _read_varint(view, position)
        number, wire_type = tag >> 3, tag & 7
        if wire_type != _LENGTH_DELIMITED:
            # A scalar of the header. Raw fields come last in what we send, so the scan is short.
            position = _skip_scalar(view, position, wire_type)
            head.append(view[start:position])
            continue
        length, position = _read_varint(view, position)
        if length > end - position:
            raise ProtocolError(f"field {number} claims {length} bytes, the message has {end - position} left")
        if number in (FIRST_RAW_FIELD, LAST_RAW_FIELD):
            raw[number] = view[position : position + length]
        elif number != PADDING_FIELD:
            head.append(view[start : position + length])
        position += length
    return parse(b"".join(head), kind), raw


def parse(data: bytes, kind: type[M]) -> M:
    """Parse a protobuf message. Raises ProtocolError."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as exc:
        raise ProtocolError(f"not a valid {kind.DESCRIPTOR.name}: {exc}") from exc
    return message


def ids_from(raw: memoryview | None) -> Ids:
    """Read raw ids, int64 [N]. Raises ProtocolError."""
    if raw is None:
        return np.empty(0, np.int64)
    if len(raw) % 8:
        raise ProtocolError(f"ids take {len(raw)} bytes, which is not a multiple of 8 (int64)")
    return np.require(np.frombuffer(raw, "<i8"), requirements="A")


def rows_from(raw: memoryview | None, num_ids: int, dim: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Read raw rows, [num_ids, dim]. Raises InvalidRows if the bytes do not fit that shape."""
    expected = num_ids * dim * dtype.itemsize
    given = 0 if raw is None else len(raw)
    if given != expected:
        raise InvalidRows(
            f"{num_ids} ids of a table of dim {dim} need {expected} bytes of {dtype.name} rows, the message has {given}"
        )
    if raw is None:
        return np.empty((num_ids, dim), dtype)
    return np.require(np.frombuffer(raw, dtype).reshape(num_ids, dim), requirements="A")


def _padding(size: int) -> bytes:
    """Return a padding field after which ``size`` bytes end aligned."""
    missing = -size % _ALIGNMENT
    if not missing:
        return b""
    # A field is at least tag + length; one shorter than that grows by a whole alignment.
    missing += _ALIGNMENT if missing < 2 else 0
    return _tag(PADDING_FIELD) + _varint(missing - 2) + bytes(missing - 2)


def _tag(number: int) -> bytes:
    return bytes((number << 3 | _LENGTH_DELIMITED,))


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(view: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(view):
            raise ProtocolError(f"the message ends inside a number, at byte {position}")
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ProtocolError(f"a number of more than 10 bytes ends at byte {position}")


def _skip_scalar(view: memoryview, position: int, wire_type: int) -> int:
    if wire_type == 0:
        return _read_varint(view, position)[1]
    if wire_type in (1, 5):
        position += 8 if wire_type == 1 else 4
        if position > len(view):
            raise ProtocolError(f"the message ends inside a number, at byte {len(view)}")
        return position
    raise ProtocolError(f"wire type {wire_type} at byte {position} is not used by this protocol")
