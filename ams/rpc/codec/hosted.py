"""Encoding of requests to hosted models: a header that names the arrays, then their bytes one after the other.

Every length, type and count in a header is checked against the received bytes before it is used.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from geartrain.ams.pb.v1 import shard_pb2
from geartrain.ams.rpc.codec import framing
from geartrain.ams.values.errors import InvalidArgument, InvalidRows, ProtocolError
from geartrain.ams.values.shard_messages import Arrays, Computed, Done, HostedInputs

MAX_NAME = 64
"""Most characters of the name of an array or a setting."""
MAX_ARRAYS = 64
"""Most arrays, and settings, of one batch or reply."""
MAX_BATCHES = 4096
"""Most batches of one update."""
_ALIGNMENT = 8
_TYPES: dict[np.dtype[Any], shard_pb2.ArrayType.ValueType] = {
    np.dtype(np.float32): shard_pb2.ARRAY_TYPE_FLOAT32,
    np.dtype(np.float64): shard_pb2.ARRAY_TYPE_FLOAT64,
    np.dtype(np.int64): shard_pb2.ARRAY_TYPE_INT64,
    np.dtype(np.int32): shard_pb2.ARRAY_TYPE_INT32,
}
_DTYPES = {code: dtype for dtype, code in _TYPES.items()}


def in_parts(
    header: shard_pb2.ComputeHostedRequest | shard_pb2.UpdateHostedRequest,
    inputs: Iterable[HostedInputs],
    part_bytes: int,
) -> list[bytes]:
    """Encode a request as one message, or as the parts of one where the data of its inputs exceed ``part_bytes``."""
    header.inputs.extend(map(_inputs_to_pb, inputs))
    data = _joined(array for batch in inputs for array in batch.arrays.values())
    count = max(1, math.ceil(len(data) / part_bytes))
    if count > 1 and not header.context.stream:
        header.context.stream = uuid.uuid4().hex  # parts are joined by stream; a read has none of its own
    messages = []
    for index in range(count):
        if count > 1:
            header.part.CopyFrom(shard_pb2.Part(index=index, count=count))
        piece = data[len(data) * index // count : len(data) * (index + 1) // count]
        messages.append(framing.encode_framed(header, [(15, piece)]))
    return messages


def encode_computed(computed: Computed) -> bytes:
    """Encode the result."""
    header = shard_pb2.ComputeHostedReply(arrays=_arrays_to_pb(computed.arrays))
    return framing.encode_framed(header, [(15, _joined(computed.arrays.values()))])


def decode_computed(data: bytes) -> Computed | Done:
    """Decode the result, or that parts are missing. Raises ProtocolError, InvalidArgument, InvalidRows."""
    header, raw = framing.decode_framed(data, shard_pb2.ComputeHostedReply)
    if header.incomplete:
        return Done(incomplete=True)
    reader = _Reader(raw.get(15))
    arrays = reader.arrays(header.arrays)
    reader.finish()
    return Computed(arrays=arrays)


def decode_inputs(inputs: Sequence[shard_pb2.HostedInputs], raw: memoryview | None) -> tuple[HostedInputs, ...]:
    """Decode the inputs of all batches. Raises ProtocolError, InvalidArgument, InvalidRows."""
    if len(inputs) > MAX_BATCHES:
        raise InvalidArgument(f"{len(inputs)} batches in one request; at most {MAX_BATCHES}. Step more often")
    reader = _Reader(raw)
    decoded = []
    for batch in inputs:
        if len(batch.settings) > MAX_ARRAYS or any(len(name) > MAX_NAME for name in batch.settings):
            raise InvalidArgument(f"a batch has at most {MAX_ARRAYS} settings with names of 1 … {MAX_NAME} characters")
        decoded.append(
            HostedInputs(
                arrays=reader.arrays(batch.arrays),
                settings=dict(batch.settings),
                seed=batch.seed,
                step=batch.step,
                weight=batch.weight if batch.HasField("weight") else 1.0,
            )
        )
    reader.finish()
    return tuple(decoded)


def _inputs_to_pb(inputs: HostedInputs) -> shard_pb2.HostedInputs:
    return shard_pb2.HostedInputs(
        arrays=_arrays_to_pb(inputs.arrays),
        settings=inputs.settings,
        seed=inputs.seed % 2**64,
        step=inputs.step % 2**64,
        weight=inputs.weight,
    )


def _arrays_to_pb(arrays: Arrays) -> list[shard_pb2.HostedArray]:
    encoded = []
    for name, array in arrays.items():
        if array.dtype not in _TYPES or array.ndim not in (1, 2):
            names = ", ".join(str(dtype) for dtype in _TYPES)
            raise InvalidRows(f"{name} is {array.dtype} {list(array.shape)}; it must be a vector or matrix of {names}")
        columns = array.shape[1] if array.ndim == 2 else None
        encoded.append(shard_pb2.HostedArray(name=name, type=_TYPES[array.dtype], rows=array.shape[0], columns=columns))
    return encoded


def _joined(arrays: Iterable[npt.NDArray[Any]]) -> npt.NDArray[np.uint8]:
    """Return the bytes of all arrays, each aligned to 8."""
    pieces: list[npt.NDArray[np.uint8]] = []
    for array in arrays:
        pieces.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        pieces.append(np.zeros(-array.nbytes % _ALIGNMENT, np.uint8))
    return np.concatenate(pieces) if pieces else np.empty(0, np.uint8)


class _Reader:
    """Reader of the arrays in the raw bytes of one message, as views."""

    def __init__(self, raw: memoryview | None) -> None:
        self._raw = memoryview(b"") if raw is None else raw
        self._position = 0

    def arrays(self, headers: Sequence[shard_pb2.HostedArray]) -> dict[str, npt.NDArray[Any]]:
        if len(headers) > MAX_ARRAYS:
            raise InvalidArgument(f"{len(headers)} arrays in one batch; at most {MAX_ARRAYS}")
        arrays: dict[str, npt.NDArray[Any]] = {}
        for header in headers:
            if not (1 <= len(header.name) <= MAX_NAME and header.name.isprintable()) or header.name in arrays:
                raise InvalidArgument(
                    f"array name {header.name[:MAX_NAME]!r} must have 1 … {MAX_NAME} printable characters, and be "
                    "given once"
                )
            arrays[header.name] = self._next(header)
        return arrays

    def finish(self) -> None:
        """Raise ProtocolError unless every byte belongs to an array."""
        if self._position != len(self._raw):
            raise ProtocolError(f"the arrays take {self._position} bytes, the message has {len(self._raw)}")

    def _next(self, header: shard_pb2.HostedArray) -> npt.NDArray[Any]:
        dtype = _DTYPES.get(header.type)
        if dtype is None:
            raise InvalidArgument(f"array {header.name!r} has type code {header.type}; known: {sorted(_DTYPES)}")
        shape = (header.rows, header.columns) if header.HasField("columns") else (header.rows,)
        size = math.prod(shape) * dtype.itemsize
        padded = size + -size % _ALIGNMENT
        left = len(self._raw) - self._position
        if padded > left:
            raise ProtocolError(f"array {header.name!r} of shape {list(shape)} needs {padded} bytes, {left} are left")
        if size == 0 and max(shape) * dtype.itemsize > np.iinfo(np.int64).max:
            raise InvalidArgument(f"array {header.name!r} has shape {list(shape)}; no length takes 2**63 bytes")
        view = self._raw[self._position : self._position + size]
        self._position += padded
        return np.require(np.frombuffer(view, dtype).reshape(shape), requirements="A")
