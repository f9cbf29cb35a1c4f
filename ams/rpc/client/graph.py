"""gRPC carrier to the graph service, and the encoding of graph downloads."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import xxhash
from grpc_health.v1 import health_pb2

from geartrain.ams.pb.v1 import graph_pb2
from geartrain.ams.rpc.client.calls import GrpcCalls
from geartrain.ams.rpc.codec import framing
from geartrain.ams.rpc.codec.messages import MessageCodec
from geartrain.ams.rpc.services import GRAPH
from geartrain.ams.values.config import MAX_MESSAGE_BYTES
from geartrain.ams.values.errors import ProtocolError
from geartrain.ams.values.graph_messages import DownloadGraph, GraphInfo
from geartrain.ams.values.interrupts import uninterrupted

_HEALTH = "/grpc.health.v1.Health/Check"
CHUNK_BYTES = 1 << 20
"""Bytes of a chunk of a download: below the least message size that can be configured."""
_DATA = 15
_INFO = MessageCodec(GraphInfo, graph_pb2.GraphInfo.DESCRIPTOR)


class GrpcGraphCarrier(GrpcCalls):
    """Carrier to the graph service."""

    def __init__(self, address: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        super().__init__(GRAPH, "graph service", address, max_message_bytes=max_message_bytes)

    def greet(self, timeout_seconds: float) -> None:
        """Ask for its health: any answer shows that it is there."""
        self.start_bytes(_HEALTH, health_pb2.HealthCheckRequest().SerializeToString(), timeout_seconds)()

    def download(self, table: str) -> tuple[GraphInfo, npt.NDArray[np.int64], npt.NDArray[Any]]:
        """Return (info, offsets, neighbours) of a graph. Raises ProtocolError if it arrived damaged or cut."""
        return uninterrupted(partial(self._download, table))

    def _download(self, table: str) -> tuple[GraphInfo, npt.NDArray[np.int64], npt.NDArray[Any]]:
        replies = self.stream(DownloadGraph(table=table))
        header, raw = framing.decode_framed(next(replies, b""), graph_pb2.DownloadGraphReply)
        if not header.HasField("graph"):
            raise ProtocolError(f"the graph service at {self.address} did not say which graph it sends")
        info: GraphInfo = _INFO.from_message(header.graph)
        offsets = np.empty(_checked_length(header.offsets_bytes, 8, info.num_classes + 1), np.int64)
        dtype = np.int32 if info.num_classes <= 2**31 else np.int64
        most = info.num_classes * min(info.k, max(info.num_classes - 1, 0))
        num_bytes = header.neighbours_bytes
        if num_bytes > most * np.dtype(dtype).itemsize or num_bytes % np.dtype(dtype).itemsize:
            raise ProtocolError(f"{num_bytes} bytes of neighbours were announced for {info}")
        filler = _Filler(offsets, np.empty(num_bytes // np.dtype(dtype).itemsize, dtype))
        filler.receive(header, raw.get(_DATA))
        for data in replies:
            filler.receive(*_chunk(data))
        filler.finish()
        return info, offsets, filler.arrays[1]


class _Filler:
    """Two arrays, filled by chunks of bytes."""

    def __init__(self, *arrays: npt.NDArray[Any]) -> None:
        self.arrays = arrays
        self._left = [array.view(np.uint8) for array in arrays]

    def receive(self, header: graph_pb2.DownloadGraphReply, raw: memoryview | None) -> None:
        data = np.frombuffer(b"" if raw is None else raw, np.uint8)
        if xxhash.xxh3_64_intdigest(data.data) != header.checksum:
            raise ProtocolError("a chunk of a graph came damaged (its checksum is another); load it again")
        while len(data):
            if not self._left:
                raise ProtocolError(f"a graph came with {len(data)} bytes more than announced; load it again")
            room = self._left[0]
            taken = min(len(room), len(data))
            room[:taken], data, self._left[0] = data[:taken], data[taken:], room[taken:]
            if taken == len(room):
                del self._left[0]

    def finish(self) -> None:
        lacking = sum(map(len, self._left))
        if lacking:
            raise ProtocolError(f"a graph came without its last {lacking} bytes; load it again")


def download_chunks(info: GraphInfo, offsets: npt.NDArray[np.int64], neighbours: npt.NDArray[Any]) -> Iterator[bytes]:
    """Encode a graph as the messages of a download."""
    header = graph_pb2.DownloadGraphReply(
        graph=cast(graph_pb2.GraphInfo, _INFO.to_message(info)),
        offsets_bytes=offsets.nbytes,
        neighbours_bytes=neighbours.nbytes,
    )
    yield _chunk_of(header, np.empty(0, np.uint8))
    for array in (offsets, neighbours):
        data = np.ascontiguousarray(array).view(np.uint8)
        for start in range(0, len(data), CHUNK_BYTES):
            yield _chunk_of(graph_pb2.DownloadGraphReply(), data[start : start + CHUNK_BYTES])


def _chunk_of(header: graph_pb2.DownloadGraphReply, data: npt.NDArray[np.uint8]) -> bytes:
    header.checksum = xxhash.xxh3_64_intdigest(data.data)
    return framing.encode_framed(header, [(_DATA, data)])


def _chunk(data: bytes) -> tuple[graph_pb2.DownloadGraphReply, memoryview | None]:
    header, raw = framing.decode_framed(data, graph_pb2.DownloadGraphReply)
    return header, raw.get(_DATA)


def _checked_length(num_bytes: int, width: int, expected: int) -> int:
    if num_bytes != width * expected:
        raise ProtocolError(f"{num_bytes} bytes of offsets were announced; they must be {width * expected}")
    return expected
