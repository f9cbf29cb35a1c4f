"""The scheduler role: its decisions behind gRPC."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc

from geartrain.ams.pb.v1 import scheduler_pb2
from geartrain.ams.rpc import codec, framing
from geartrain.ams.rpc.scheduler_client import SCHEDULER_SERVICE
from geartrain.ams.rpc.server import GrpcServer, require_waiting
from geartrain.ams.rpc.shard_client import GrpcCarrier
from geartrain.ams.scheduler.data_streams import DataStreams
from geartrain.ams.scheduler.incarnations import Incarnations
from geartrain.ams.scheduler.scheduler import Scheduler
from geartrain.ams.storage.kv.store import KeyValueStore, LockedStore, MemoryStore
from geartrain.ams.values.config import SchedulerConfig, split_address
from geartrain.ams.values.errors import ConfigError, ProtocolError
from geartrain.ams.values.messages import CallContext

_PULSES_PER_LEASE = 10

# A change of tables waits for shards and for other changes, for minutes if it must. Heartbeats that waited behind such
# calls would cost living shards their place.
_MEMBERSHIP_THREADS = 8
_MEMBERSHIP = ("Register", "Heartbeat", "Leave")
_TABLE_THREADS = 64
_TABLES = ("CreateClusterTable", "DropClusterTable", "PublishClusterTables")

_STATES = {
    "up": scheduler_pb2.ShardEntry.STATE_UP,
    "silent": scheduler_pb2.ShardEntry.STATE_SILENT,
    "lost": scheduler_pb2.ShardEntry.STATE_LOST,
    "missing": scheduler_pb2.ShardEntry.STATE_MISSING,
}

_CONNECT_SECONDS = 5.0
"""How long a shard that is overloaded, or stopped for a moment, is waited for when it is to be told of a table."""


class SchedulerService:
    """Decodes, asks the scheduler, encodes."""

    def __init__(self, scheduler: Scheduler, streams: DataStreams) -> None:
        self._scheduler = scheduler
        self._streams = streams

    @property
    def methods(self) -> dict[str, Any]:
        """The methods by name, from encoded request to encoded reply."""
        return {
            "Register": self.register,
            "Heartbeat": self.heartbeat,
            "Leave": self.leave,
            "DescribeCluster": self.describe_cluster,
            "CreateClusterTable": self.create_table,
            "DropClusterTable": self.drop_table,
            "TakeIncarnation": self.take_incarnation,
            "PublishClusterTables": self.publish_tables,
            "CheckCaller": self.check_caller,
            "FenceJob": self.fence_job,
            "LeaseStreams": self.lease_streams,
            "RenewStreams": self.renew_streams,
            "ReleaseStreams": self.release_streams,
            "DescribeStreams": self.describe_streams,
            "DescribeHolders": self.describe_holders,
            "RestoreStreams": self.restore_streams,
        }

    def register(self, data: bytes, _: grpc.ServicerContext) -> bytes:
        """A shard joins."""
        request = framing.parse(data, scheduler_pb2.RegisterRequest)
        if split_address(request.address)[1] == 0:  # the scheduler itself calls it, and tells it to every client
            raise ConfigError(f"address {request.address!r} has port 0, where nobody can be reached")
        # First: once all shards have registered, incarnations are given out above what they have seen.
        self._scheduler.hear_incarnation(request.highest_incarnation)
        registration = self._scheduler.register(
            request.address,
            request.shard if request.HasField("shard") else None,
            request.incarnation,
            cluster_version=request.cluster_version,
            heartbeat_seconds=request.heartbeat_seconds,
            tables=[codec.spec_from_pb(table) for table in request.tables],
            restoring_tables=request.restoring_tables,
        )
        return scheduler_pb2.RegisterReply(
            shard=registration.shard,
            num_shards=registration.num_shards,
            cluster_version=registration.cluster_version,
            lease_seconds=self._scheduler.lease_seconds,
        ).SerializeToString()

    def heartbeat(self, data: bytes, _: grpc.ServicerContext) -> bytes:
        """A shard lives."""
        request = framing.parse(data, scheduler_pb2.HeartbeatRequest)
        self._scheduler.hear_incarnation(request.highest_incarnation)
        beat = self._scheduler.heartbeat(request.shard, request.incarnation)
        return scheduler_pb2.HeartbeatReply(
            unknown=beat.unknown, replaced=beat.replaced, cluster_version=beat.cluster_version
        ).SerializeToString()

    def leave(self, data: bytes, _: grpc.ServicerContext) -> bytes:
        """A shard goes."""
        request = framing.parse(data, scheduler_pb2.LeaveRequest)
        self._scheduler.leave(request.shard, request.incarnation)
        return scheduler_pb2.LeaveReply().SerializeToString()

    def describe_cluster(self, data: bytes, _: grpc.ServicerContext) -> bytes:
        """The cluster as it is now."""
        framing.parse(data, scheduler_pb2.DescribeClusterRequest)
        view = self._scheduler.describe()
        return scheduler_pb2.DescribeClusterReply(
            cluster_version=view.cluster_version,
            num_shards=view.num_shards,
            ready=view.ready,
            shards=[
                scheduler_pb2.ShardEntry(
                    shard=entry.shard,
                    address=entry.address,
                    incarnation=entry.incarnation,
                    state=_STATES[entry.state],
                    heartbeat_age_seconds=entry.heartbeat_age_seconds,
                )
                for entry in view.shards
            ],
            tables=[codec.spec_to_pb(spec) for spec in view.tables],
            incomplete_tables=view.incomplete_tables,
            restoring_tables=view.restoring_tables,
            bucket_shards=view.bucket_shards.astype("<u2").tobytes(),
        ).SerializeToString()

    def create_table(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
        """Make a table on all shards."""
        request = framing.parse(data, scheduler_pb2.CreateClusterTableRequest)
        caller = codec.context_from_pb(request.caller)
        made = self._scheduler.create_table(
            codec.spec_from_pb(request.spec),
            reuse=request.reuse,
            require_current=self._require_current(caller, servicer_context),
            for_restore=request.for_restore,
            replace=request.replace,
        )
        return scheduler_pb2.CreateClusterTableReply(incarnation=made.incarnation).SerializeToString()

    def drop_table(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
        """Remove a table from all shards."""
        request = framing.parse(data, scheduler_pb2.DropClusterTableRequest)
        caller = codec.context_from_pb(request.caller)
        self._scheduler.drop_table(
            request.table,
            incarnation=request.incarnation,
            require_current=self._require_current(caller, servicer_context),
        )
        return scheduler_pb2.DropClusterTableReply().SerializeToString()

    def publish_tables(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
        """Open restored tables on all shards."""
        request = framing.parse(data, scheduler_pb2.PublishClusterTablesRequest)
        caller = codec.context_from_pb(request.caller)
        if len(request.tables) != len(request.incarnations):
            raise ProtocolError(f"{len(request.tables)} tables have {len(request.incarnations)} incarnations")
        self._scheduler.publish_tables(
            dict(zip(request.tables, request.incarnations, strict=True)),
            require_current=self._require_current(caller, servicer_context),
        )
        return scheduler_pb2.PublishClusterTablesReply().SerializeToString()

    def _require_current(self, caller: CallContext, servicer_context: grpc.ServicerContext) -> Callable[[], None]:
        """What ends a change of tables whose turn comes too late: nobody waits for it, or its job was taken over."""

        def require() -> None:
            require_waiting(servicer_context)
            self._streams.require_current(caller)

        return require

    def take_incarnation(self, data: bytes, _: grpc.ServicerContext) -> bytes:
        """Number a job or stream that begins."""
        request = framing.parse(data, scheduler_pb2.TakeIncarnationRequest)
        incarnation = self._scheduler.take_incarnation(request.chosen)
        return scheduler_pb2.TakeIncarnationReply(incarnation=incarnation).SerializeToString()

    def check_caller(self, data: bytes, _: grpc.ServicerContext) -> bytes:
        """Say whether a job was taken over."""
        request = framing.parse(data, scheduler_pb2.CheckCallerRequest)
        self._streams.require_current(codec.context_from_pb(request.caller))
        return scheduler_pb2.CheckCallerReply().SerializeToString()

    def fence_job(self, data: bytes, _: grpc.ServicerContext) -> bytes:
        """Shut out the past of a job."""
        request = framing.parse(data, scheduler_pb2.FenceJobRequest)
        self._streams.fence(request.job, request.incarnation)
        return scheduler_pb2.FenceJobReply().SerializeToString()

    def lease_streams(self, data: bytes, _: grpc.ServicerContext) -> bytes:
        """Give streams to a worker."""
        request = framing.parse(data, scheduler_pb2.LeaseStreamsRequest)
        lease = self._streams.lease(
            *_reader(request.reader), num_streams=request.num_streams, num_workers=request.num_workers
        )
        return scheduler_pb2.LeaseStreamsReply(
            epoch=lease.epoch, lease_seconds=lease.lease_seconds, cursors=codec.cursors_to_pb(lease.cursors)
        ).SerializeToString()

    def renew_streams(self, data: bytes, _: grpc.ServicerContext) -> bytes:
        """Commit cursors."""
        request = framing.parse(data, scheduler_pb2.RenewStreamsRequest)
        renewal = self._streams.renew(*_reader(request.reader), codec.cursors_from_pb(request.cursors))
        return scheduler_pb2.RenewStreamsReply(
            epoch=renewal.epoch, held=renewal.held, release=renewal.release, can_lease=renewal.can_lease
        ).SerializeToString()

    def release_streams(self, data: bytes, _: grpc.ServicerContext) -> bytes:
        """Take streams back."""
        request = framing.parse(data, scheduler_pb2.ReleaseStreamsRequest)
        streams = None if request.all else tuple(request.streams)
        self._streams.release(*_reader(request.reader), codec.cursors_from_pb(request.cursors), streams)
        return scheduler_pb2.ReleaseStreamsReply().SerializeToString()

    def describe_streams(self, data: bytes, _: grpc.ServicerContext) -> bytes:
        """The committed cursors of a job."""
        request = framing.parse(data, scheduler_pb2.DescribeStreamsRequest)
        cursors = codec.cursors_to_pb(self._streams.cursors(request.job))
        return scheduler_pb2.DescribeStreamsReply(cursors=cursors).SerializeToString()

    def describe_holders(self, data: bytes, _: grpc.ServicerContext) -> bytes:
        """Who reads a job."""
        found = self._streams.holders(framing.parse(data, scheduler_pb2.DescribeHoldersRequest).job)
        return scheduler_pb2.DescribeHoldersReply(
            lease_seconds=found.lease_seconds,
            holders=[holder or "" for holder in found.holders],
            incarnations=found.incarnations,
        ).SerializeToString()

    def restore_streams(self, data: bytes, _: grpc.ServicerContext) -> bytes:
        """Put a job back."""
        request = framing.parse(data, scheduler_pb2.RestoreStreamsRequest)
        self._streams.restore(request.job, request.incarnation, codec.cursors_from_pb(request.cursors))
        return scheduler_pb2.RestoreStreamsReply().SerializeToString()


def _reader(reader: scheduler_pb2.StreamReader) -> tuple[str, str, int]:
    return reader.job, reader.worker, reader.incarnation


class SchedulerServer:
    """The scheduler of a cluster: start, serve until stopped."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._server: GrpcServer | None = None
        self._pulse: threading.Thread | None = None
        self._membership = ThreadPoolExecutor(_MEMBERSHIP_THREADS, thread_name_prefix="membership")
        self._tables = ThreadPoolExecutor(_TABLE_THREADS, thread_name_prefix="tables")
        self._store: KeyValueStore | None = None
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self.end_reason: str | None = None
        """Why it ended by itself: it never does."""

    def start(self) -> str:
        """Bind and serve; return the address.

        Raises ConfigError (the port or the data folder is in use, or the state is another cluster's), StateDamaged.
        """
        # Loaded only where it is wanted.
        if self._config.data is not None:
            from geartrain.ams.storage.kv.lmdb_store import LmdbStore

            self._store = LmdbStore(self._config.data)
        try:
            return self._start()
        except BaseException:
            self.stop(0)
            raise

    def _start(self) -> str:
        store = LockedStore(MemoryStore() if self._store is None else self._store)
        incarnations = Incarnations(store)
        streams = DataStreams(store, self._config.stream_lease_seconds, incarnations=incarnations)
        scheduler = Scheduler(
            self._config.num_shards,
            lambda address: GrpcCarrier(
                address, max_message_bytes=self._config.max_message_bytes, connect_seconds=_CONNECT_SECONDS
            ),
            lease_seconds=self._config.lease_seconds,
            store=store,
            incarnations=incarnations,
        )
        self._server = GrpcServer(self._config.listen, self._config.max_message_bytes)
        self._server.add(
            SCHEDULER_SERVICE,
            SchedulerService(scheduler, streams).methods,
            lanes=dict.fromkeys(_MEMBERSHIP, self._membership) | dict.fromkeys(_TABLES, self._tables),
        )
        self._server.start()
        self._server.ready()
        # Each in the queue of the calls that it speaks for: if these wait, so does the pulse.
        pulses = {scheduler.pulse: self._membership, streams.pulse: self._server.calls}
        self._pulse = threading.Thread(target=self._run_pulse, args=(pulses,), name="pulse", daemon=True)
        self._pulse.start()
        return self._server.address

    def _run_pulse(self, pulses: dict[Callable[[], None], ThreadPoolExecutor]) -> None:
        shortest = min(self._config.lease_seconds, self._config.stream_lease_seconds)
        last: dict[Callable[[], None], Future[None]] = {}
        while not self._stopping.wait(shortest / _PULSES_PER_LEASE):
            for pulse, queue in pulses.items():
                if pulse not in last or last[pulse].done():
                    last[pulse] = queue.submit(pulse)

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Block until stopped; False if the time ran out first."""
        return self._ended.wait(timeout_seconds)

    def stop(self, grace_seconds: float = 5.0) -> None:
        """Finish the calls under way and end. Idempotent."""
        self._stopping.set()  # before the threads that pulses run on end
        if self._pulse is not None:
            self._pulse.join()
            self._pulse = None
        if self._server is not None:
            self._server.stop(grace_seconds)
            self._server = None
        for lane in (self._membership, self._tables):
            lane.shutdown(wait=False)
        self._ended.set()
        if self._store is not None:
            self._store.close()
            self._store = None
