"""The gRPC carrier to the scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import Message

from geartrain.ams.pb.v1 import scheduler_pb2
from geartrain.ams.rpc import codec, framing
from geartrain.ams.rpc.carrier import (
    AttemptFailed,
    ClusterView,
    Cursor,
    ShardEntry,
    StreamHolders,
    StreamLease,
    StreamRenewal,
)
from geartrain.ams.rpc.shard_client import CONNECT_SECONDS, channel_options
from geartrain.ams.rpc.silence import ASK_AFTER_SECONDS, LONGEST_PAUSE_SECONDS, Peer, SilenceLog
from geartrain.ams.rpc.status import error_from
from geartrain.ams.values.config import MAX_MESSAGE_BYTES
from geartrain.ams.values.errors import ProtocolError
from geartrain.ams.values.interrupts import aside
from geartrain.ams.values.messages import CallContext
from geartrain.ams.values.placement import NUM_BUCKETS
from geartrain.ams.values.specs import TableSpec

SCHEDULER_SERVICE = "geartrain.ams.v1.Scheduler"

_STATES = {
    scheduler_pb2.ShardEntry.STATE_UP: "up",
    scheduler_pb2.ShardEntry.STATE_SILENT: "silent",
    scheduler_pb2.ShardEntry.STATE_LOST: "lost",
    scheduler_pb2.ShardEntry.STATE_MISSING: "missing",
}


def _reader(job: str, worker: str, incarnation: int) -> scheduler_pb2.StreamReader:
    return scheduler_pb2.StreamReader(job=job, worker=worker, incarnation=incarnation)


class GrpcSchedulerCarrier:
    """The way to the scheduler over gRPC. A call waits ``connect_seconds`` for a connection, as with GrpcCarrier."""

    def __init__(
        self,
        address: str,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        connect_seconds: float = CONNECT_SECONDS,
    ) -> None:
        self.address = address
        self._peer, self._silence = Peer("scheduler", address), SilenceLog()
        self._channel = grpc.insecure_channel(address, options=channel_options(max_message_bytes, connect_seconds))

    def describe(self, timeout_seconds: float | None) -> ClusterView:
        """See :class:`SchedulerCarrier`."""
        ask = scheduler_pb2.DescribeClusterRequest()
        reply = self._call("DescribeCluster", ask, scheduler_pb2.DescribeClusterReply, timeout_seconds)
        bucket_shards = np.frombuffer(reply.bucket_shards, "<u2")
        if len(bucket_shards) != NUM_BUCKETS:
            raise ProtocolError(
                f"the scheduler at {self.address} placed {len(bucket_shards)} buckets, not {NUM_BUCKETS}"
            )
        return ClusterView(
            cluster_version=reply.cluster_version,
            num_shards=reply.num_shards,
            ready=reply.ready,
            shards=tuple(
                ShardEntry(
                    shard=entry.shard,
                    address=entry.address,
                    incarnation=entry.incarnation,
                    state=_STATES.get(entry.state, "missing"),  # type: ignore[arg-type]
                    heartbeat_age_seconds=entry.heartbeat_age_seconds,
                )
                for entry in reply.shards
            ),
            tables=tuple(codec.spec_from_pb(table) for table in reply.tables),
            bucket_shards=bucket_shards,
            incomplete_tables=tuple(reply.incomplete_tables),
            restoring_tables=tuple(reply.restoring_tables),
        )

    def create_table(
        self,
        spec: TableSpec,
        *,
        reuse: bool,
        timeout_seconds: float | None,
        caller: CallContext | None = None,
        for_restore: bool = False,
        replace: bool = False,
    ) -> TableSpec:
        """See :class:`SchedulerCarrier`."""
        request = scheduler_pb2.CreateClusterTableRequest(
            spec=codec.spec_to_pb(spec),
            reuse=reuse,
            caller=codec.context_to_pb(caller or CallContext()),
            for_restore=for_restore,
            replace=replace,
        )
        reply = self._call("CreateClusterTable", request, scheduler_pb2.CreateClusterTableReply, timeout_seconds)
        return dataclasses.replace(spec, incarnation=reply.incarnation)

    def publish_tables(
        self, tables: Mapping[str, int], timeout_seconds: float | None, *, caller: CallContext | None = None
    ) -> None:
        """See :class:`SchedulerCarrier`."""
        request = scheduler_pb2.PublishClusterTablesRequest(
            tables=tables.keys(),
            incarnations=tables.values(),
            caller=codec.context_to_pb(caller or CallContext()),
        )
        self._call("PublishClusterTables", request, scheduler_pb2.PublishClusterTablesReply, timeout_seconds)

    def drop_table(
        self, table: str, timeout_seconds: float | None, *, caller: CallContext | None = None, incarnation: int = 0
    ) -> None:
        """See :class:`SchedulerCarrier`."""
        request = scheduler_pb2.DropClusterTableRequest(
            table=table, caller=codec.context_to_pb(caller or CallContext()), incarnation=incarnation
        )
        self._call("DropClusterTable", request, scheduler_pb2.DropClusterTableReply, timeout_seconds)

    def take_incarnation(self, chosen: int, timeout_seconds: float | None) -> int:
        """See :class:`SchedulerCarrier`."""
        request = scheduler_pb2.TakeIncarnationRequest(chosen=chosen)
        return self._call("TakeIncarnation", request, scheduler_pb2.TakeIncarnationReply, timeout_seconds).incarnation

    def check_caller(self, caller: CallContext, timeout_seconds: float | None) -> None:
        """See :class:`SchedulerCarrier`."""
        request = scheduler_pb2.CheckCallerRequest(caller=codec.context_to_pb(caller))
        self._call("CheckCaller", request, scheduler_pb2.CheckCallerReply, timeout_seconds)

    def fence_job(self, job: str, incarnation: int, timeout_seconds: float | None) -> None:
        """See :class:`SchedulerCarrier`."""
        request = scheduler_pb2.FenceJobRequest(job=job, incarnation=incarnation)
        self._call("FenceJob", request, scheduler_pb2.FenceJobReply, timeout_seconds)

    def lease_streams(
        self,
        job: str,
        worker: str,
        incarnation: int,
        *,
        num_streams: int,
        num_workers: int,
        timeout_seconds: float | None,
    ) -> StreamLease:
        """See :class:`SchedulerCarrier`."""
        request = scheduler_pb2.LeaseStreamsRequest(
            reader=_reader(job, worker, incarnation), num_streams=num_streams, num_workers=num_workers
        )
        reply = self._call("LeaseStreams", request, scheduler_pb2.LeaseStreamsReply, timeout_seconds)
        return StreamLease(
            epoch=reply.epoch, lease_seconds=reply.lease_seconds, cursors=codec.cursors_from_pb(reply.cursors)
        )

    def renew_streams(
        self, job: str, worker: str, incarnation: int, cursors: Mapping[int, Cursor], timeout_seconds: float | None
    ) -> StreamRenewal:
        """See :class:`SchedulerCarrier`."""
        request = scheduler_pb2.RenewStreamsRequest(
            reader=_reader(job, worker, incarnation), cursors=codec.cursors_to_pb(cursors)
        )
        reply = self._call("RenewStreams", request, scheduler_pb2.RenewStreamsReply, timeout_seconds)
        return StreamRenewal(
            epoch=reply.epoch, held=tuple(reply.held), release=tuple(reply.release), can_lease=reply.can_lease
        )

    def release_streams(
        self,
        job: str,
        worker: str,
        incarnation: int,
        cursors: Mapping[int, Cursor],
        streams: Sequence[int] | None,
        timeout_seconds: float | None,
    ) -> None:
        """See :class:`SchedulerCarrier`."""
        request = scheduler_pb2.ReleaseStreamsRequest(
            reader=_reader(job, worker, incarnation),
            cursors=codec.cursors_to_pb(cursors),
            streams=streams or (),
            all=streams is None,
        )
        self._call("ReleaseStreams", request, scheduler_pb2.ReleaseStreamsReply, timeout_seconds)

    def stream_cursors(self, job: str, timeout_seconds: float | None) -> dict[int, Cursor]:
        """See :class:`SchedulerCarrier`."""
        request = scheduler_pb2.DescribeStreamsRequest(job=job)
        reply = self._call("DescribeStreams", request, scheduler_pb2.DescribeStreamsReply, timeout_seconds)
        return codec.cursors_from_pb(reply.cursors)

    def stream_holders(self, job: str, timeout_seconds: float | None) -> StreamHolders:
        """See :class:`SchedulerCarrier`."""
        request = scheduler_pb2.DescribeHoldersRequest(job=job)
        reply = self._call("DescribeHolders", request, scheduler_pb2.DescribeHoldersReply, timeout_seconds)
        return StreamHolders(
            lease_seconds=reply.lease_seconds,
            holders=tuple(holder or None for holder in reply.holders),
            incarnations=dict(reply.incarnations),
        )

    def restore_streams(
        self, job: str, incarnation: int, cursors: Mapping[int, Cursor], timeout_seconds: float | None
    ) -> None:
        """See :class:`SchedulerCarrier`."""
        request = scheduler_pb2.RestoreStreamsRequest(
            job=job, incarnation=incarnation, cursors=codec.cursors_to_pb(cursors)
        )
        self._call("RestoreStreams", request, scheduler_pb2.RestoreStreamsReply, timeout_seconds)

    def register(
        self, request: scheduler_pb2.RegisterRequest, timeout_seconds: float | None
    ) -> scheduler_pb2.RegisterReply:
        """Join the cluster (shards only)."""
        return self._call("Register", request, scheduler_pb2.RegisterReply, timeout_seconds)

    def heartbeat(
        self, shard: int, incarnation: int, timeout_seconds: float, *, highest_incarnation: int = 0
    ) -> scheduler_pb2.HeartbeatReply:
        """Say that a shard lives, and the highest incarnation of a job, stream or table that it has seen."""
        request = scheduler_pb2.HeartbeatRequest(
            shard=shard, incarnation=incarnation, highest_incarnation=highest_incarnation
        )
        return self._call("Heartbeat", request, scheduler_pb2.HeartbeatReply, timeout_seconds)

    def leave(self, shard: int, incarnation: int, timeout_seconds: float) -> None:
        """Say that a shard goes."""
        request = scheduler_pb2.LeaveRequest(shard=shard, incarnation=incarnation)
        self._call("Leave", request, scheduler_pb2.LeaveReply, timeout_seconds)

    def close(self) -> None:
        """Close the channel."""
        aside(self._channel.close)

    def _call(self, method: str, request: Message, kind: type[framing.M], timeout_seconds: float | None) -> framing.M:
        call: Any = self._channel.unary_unary(f"/{SCHEDULER_SERVICE}/{method}")

        def reply() -> bytes:
            pending = call.future(request.SerializeToString(), timeout=timeout_seconds)
            wait = "until it does" if timeout_seconds is None else f"up to {timeout_seconds:g} s"
            pause = ASK_AFTER_SECONDS
            while True:
                try:
                    data: bytes = pending.result(pause)
                except grpc.FutureTimeoutError:
                    self._silence.ask(lambda: () if pending.done() else (self._peer,), wait)
                    pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
                else:
                    self._silence.heard(self._peer)
                    return data

        try:
            return framing.parse(aside(reply), kind)
        except grpc.RpcError as exc:
            raise error_from(exc, f"scheduler at {self.address}") from exc
        except (ValueError, grpc.FutureCancelledError) as exc:
            raise AttemptFailed(f"scheduler at {self.address}: the connection is closed") from exc


def registration(
    *,
    address: str,
    shard: int | None,
    incarnation: int,
    cluster_version: int,
    heartbeat_seconds: float,
    tables: Sequence[TableSpec],
    highest_incarnation: int,
    restoring_tables: Sequence[str],
) -> scheduler_pb2.RegisterRequest:
    """How a shard introduces itself; the fields are those of the message."""
    return scheduler_pb2.RegisterRequest(
        address=address,
        shard=shard,
        incarnation=incarnation,
        cluster_version=cluster_version,
        heartbeat_seconds=heartbeat_seconds,
        tables=[codec.spec_to_pb(spec) for spec in tables],
        highest_incarnation=highest_incarnation,
        restoring_tables=restoring_tables,
    )
