"""The way to the graph service over gRPC, and what travels there as bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import xxhash
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from geartrain.ams.pb.v1 import graph_pb2
from geartrain.ams.rpc import framing
from geartrain.ams.rpc.carrier import AttemptFailed
from geartrain.ams.rpc.shard_client import channel_options
from geartrain.ams.rpc.status import error_from
from geartrain.ams.values.config import MAX_MESSAGE_BYTES
from geartrain.ams.values.errors import ProtocolError
from geartrain.ams.values.graph_messages import GraphBuilding, GraphBuilt, GraphInfo, GraphsState
from geartrain.ams.values.interrupts import aside
from geartrain.ams.values.specs import Ids

GRAPH_SERVICE = "geartrain.ams.v1.Graph"
HEALTH_SERVICE = "grpc.health.v1.Health"
CHUNK_BYTES = 1 << 20
"""Of a download: below the least message size that can be configured."""
_LABELS = _IDS = 14
_DATA = 15


class GrpcGraphCarrier:
    """Each call may raise the service's GeartrainError, or AttemptFailed. Thread-safe."""

    def __init__(self, address: str, *, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.address = address
        self._channel = grpc.insecure_channel(address, options=channel_options(max_message_bytes))

    def build(self, table: str, k: int, step: int) -> Iterator[GraphBuilding | GraphBuilt]:
        """Yield how far the build is, several times a second, and last what was built."""
        request = graph_pb2.BuildGraphRequest(table=table, k=k, step=step)
        for data in self._stream("BuildGraph", request):
            reply = framing.parse(data, graph_pb2.BuildGraphReply)
            if reply.HasField("built"):
                yield GraphBuilt(graph=info_from_pb(reply.built), resumed_pairs=reply.resumed_pairs)
            else:
                yield _building_from_pb(reply.building)

    def greet(self, timeout_seconds: float) -> None:
        """Ask for its health: whatever it says, it is there."""
        self._send("Check", health_pb2.HealthCheckRequest().SerializeToString(), timeout_seconds, HEALTH_SERVICE)

    def cancel(self, table: str, timeout_seconds: float) -> bool:
        """End a build."""
        request = graph_pb2.CancelBuildRequest(table=table)
        return self._call("CancelBuild", request, graph_pb2.CancelBuildReply, timeout_seconds).cancelled

    def select(
        self, table: str, labels: Ids, budget: int, seed: int, step: int, version: int | None, timeout_seconds: float
    ) -> Ids:
        """The active classes of a batch."""
        header = graph_pb2.SelectClassesRequest(
            table=table, budget=budget, seed=seed % 2**64, step=step % 2**64, version=version
        )
        data = framing.encode_framed(header, [(_LABELS, np.ascontiguousarray(labels, "<i8"))])
        _, raw = framing.decode_framed(self._send("SelectClasses", data, timeout_seconds), graph_pb2.SelectClassesReply)
        return framing.ids_from(raw.get(_IDS))

    def describe(self, timeout_seconds: float) -> GraphsState:
        """All graphs."""
        ask = graph_pb2.DescribeGraphsRequest()
        reply = self._call("DescribeGraphs", ask, graph_pb2.DescribeGraphsReply, timeout_seconds)
        return GraphsState(
            graphs=tuple(map(info_from_pb, reply.graphs)), building=tuple(map(_building_from_pb, reply.building))
        )

    def download(self, table: str) -> tuple[GraphInfo, npt.NDArray[np.int64], npt.NDArray[Any]]:
        """(what it is, offsets, neighbours) of a graph. Raises ProtocolError if it came damaged or cut."""
        return aside(partial(self._download, table))

    def _download(self, table: str) -> tuple[GraphInfo, npt.NDArray[np.int64], npt.NDArray[Any]]:
        replies = self._stream("DownloadGraph", graph_pb2.DownloadGraphRequest(table=table))
        header, raw = framing.decode_framed(next(replies, b""), graph_pb2.DownloadGraphReply)
        if not header.HasField("graph"):
            raise ProtocolError(f"the graph service at {self.address} did not say which graph it sends")
        info = info_from_pb(header.graph)
        offsets = np.empty(_checked_length(header.offsets_bytes, 8, info.num_classes + 1), np.int64)
        dtype = np.int32 if info.num_classes <= 2**31 else np.int64
        most = info.num_classes * min(info.k, max(info.num_classes - 1, 0))
        num_bytes = header.neighbours_bytes
        if num_bytes > most * np.dtype(dtype).itemsize or num_bytes % np.dtype(dtype).itemsize:
            raise ProtocolError(f"{num_bytes} bytes of neighbours were announced for {info}")
        filler = _Filler(offsets, np.empty(num_bytes // np.dtype(dtype).itemsize, dtype))
        filler.take(header, raw.get(_DATA))
        for data in replies:
            filler.take(*_chunk(data))
        filler.finish()
        return info, offsets, filler.arrays[1]

    def forget(self, table: str, timeout_seconds: float) -> None:
        """Drop a graph."""
        request = graph_pb2.ForgetGraphRequest(table=table)
        self._call("ForgetGraph", request, graph_pb2.ForgetGraphReply, timeout_seconds)

    def write_snapshot(
        self, folder: str, snapshot_id: str, tables: Mapping[str, int], num_shards: int, timeout_seconds: float
    ) -> list[str]:
        """Write graphs into a staging folder; return the entries of the manifest as JSON."""
        listed = [graph_pb2.GraphTable(table=name, num_classes=number) for name, number in tables.items()]
        request = graph_pb2.WriteGraphsRequest(
            snapshot_id=snapshot_id, folder=folder, tables=listed, num_shards=num_shards
        )
        return list(self._call("WriteGraphs", request, graph_pb2.WriteGraphsReply, timeout_seconds).files)

    def restore_snapshot(self, folder: str, tables: Mapping[str, int], timeout_seconds: float) -> list[str]:
        """Take graphs of tables, name -> incarnation, from a snapshot; return the tables that had one."""
        request = graph_pb2.RestoreGraphsRequest(folder=folder, tables=tables.keys(), incarnations=tables.values())
        return list(self._call("RestoreGraphs", request, graph_pb2.RestoreGraphsReply, timeout_seconds).restored)

    def close(self) -> None:
        """Close the channel."""
        aside(self._channel.close)

    def _call(self, method: str, request: Message, kind: type[framing.M], timeout_seconds: float) -> framing.M:
        return framing.parse(self._send(method, request.SerializeToString(), timeout_seconds), kind)

    def _send(self, method: str, data: bytes, timeout_seconds: float, service: str = GRAPH_SERVICE) -> bytes:
        call: Any = self._channel.unary_unary(f"/{service}/{method}")
        try:
            reply: bytes = aside(partial(call, data, timeout=timeout_seconds))
        except grpc.RpcError as exc:
            raise error_from(exc, self._peer) from exc
        except ValueError as exc:  # how gRPC says it
            raise AttemptFailed(f"{self._peer}: the connection is closed") from exc
        return reply

    def _stream(self, method: str, request: Message) -> Iterator[bytes]:
        call: Any = self._channel.unary_stream(f"/{GRAPH_SERVICE}/{method}")
        try:
            replies = call(request.SerializeToString())
        except ValueError as exc:
            raise AttemptFailed(f"{self._peer}: the connection is closed") from exc
        try:
            yield from replies
        except grpc.RpcError as exc:
            raise error_from(exc, self._peer) from exc
        finally:
            replies.cancel()

    @property
    def _peer(self) -> str:
        return f"graph service at {self.address}"


class _Filler:
    """Two arrays, filled by chunks of bytes."""

    def __init__(self, *arrays: npt.NDArray[Any]) -> None:
        self.arrays = arrays
        self._left = [array.view(np.uint8) for array in arrays]

    def take(self, header: graph_pb2.DownloadGraphReply, raw: memoryview | None) -> None:
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
        graph=info_to_pb(info), offsets_bytes=offsets.nbytes, neighbours_bytes=neighbours.nbytes
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


def info_to_pb(info: GraphInfo) -> graph_pb2.GraphInfo:
    """Encode what a graph is."""
    return graph_pb2.GraphInfo(
        table=info.table,
        version=info.version,
        k=info.k,
        num_classes=info.num_classes,
        step=info.step,
        writes=info.writes,
        fingerprint=info.fingerprint,
        built_unix_seconds=info.built_unix_seconds,
        whole_bytes=info.whole_bytes,
        shard_bytes=info.shard_bytes,
        age_writes=info.age_writes,
        table_incarnation=info.table_incarnation,
    )


def info_from_pb(info: graph_pb2.GraphInfo) -> GraphInfo:
    """Decode what a graph is."""
    return GraphInfo(
        table=info.table,
        version=info.version,
        k=info.k,
        num_classes=info.num_classes,
        step=info.step,
        writes=info.writes,
        fingerprint=info.fingerprint,
        built_unix_seconds=info.built_unix_seconds,
        whole_bytes=info.whole_bytes,
        shard_bytes=tuple(info.shard_bytes),
        age_writes=info.age_writes if info.HasField("age_writes") else None,
        table_incarnation=info.table_incarnation,
    )


def building_to_pb(building: GraphBuilding) -> graph_pb2.GraphBuilding:
    """Encode how far a build is."""
    return graph_pb2.GraphBuilding(
        table=building.table,
        k=building.k,
        step=building.step,
        done_pairs=building.done_pairs,
        total_pairs=building.total_pairs,
        seconds=building.seconds,
    )


def _building_from_pb(building: graph_pb2.GraphBuilding) -> GraphBuilding:
    return GraphBuilding(
        table=building.table,
        k=building.k,
        step=building.step,
        done_pairs=building.done_pairs,
        total_pairs=building.total_pairs,
        seconds=building.seconds,
    )
