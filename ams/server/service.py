"""The server role: shards behind gRPC, registered with the scheduler."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any

import grpc
import numpy as np

from geartrain.ams import failpoints
from geartrain.ams.config import ServerConfig, split_address
from geartrain.ams.core import ops
from geartrain.ams.errors import (
    ClusterNotReady,
    ConfigError,
    GeartrainError,
    InvalidRows,
    MessageTooLarge,
    SchedulerUnavailable,
    ShardUnavailable,
    StepPending,
)
from geartrain.ams.hosted import HostedModels
from geartrain.ams.messages import (
    Assign,
    CreateTable,
    Describe,
    Done,
    DropTable,
    Fence,
    Freeze,
    PublishTable,
    Pull,
    Push,
    Request,
    Restore,
    Thaw,
    WriteFrozen,
)
from geartrain.ams.pb.v1 import scheduler_pb2, shard_pb2, types_pb2
from geartrain.ams.placement import buckets_of_shard, even_placement
from geartrain.ams.server.lease import BEATS_PER_LEASE, PULSES_PER_LEASE, Lease, boot_seconds
from geartrain.ams.server.machine import keep_large_buffers, limit_row_memory, threads_per_shard
from geartrain.ams.server.parts import PartBuffer, Payload
from geartrain.ams.server.shard import Shard, new_incarnation
from geartrain.ams.specs import DTYPES, TableSpec
from geartrain.ams.storage.snapshot_roots import SnapshotRoots, checked_snapshot_id
from geartrain.ams.transport import grpc_codec as codec
from geartrain.ams.transport import grpc_framing as framing
from geartrain.ams.transport import grpc_hosted as hosted
from geartrain.ams.transport.bulk import BulkConnection, BulkPort, NotOffered, seconds_to_receive
from geartrain.ams.transport.carrier import AttemptFailed
from geartrain.ams.transport.grpc_client import SHARD_SERVICE, WAITS_KEY
from geartrain.ams.transport.grpc_scheduler import GrpcSchedulerCarrier
from geartrain.ams.transport.grpc_server import MAX_CONCURRENT_CALLS, BytesMethod, GrpcServer, await_reply
from geartrain.ams.transport.grpc_waiting import BeginMethod, Begun
from geartrain.ams.transport.shared_memory import HeldSegments, SharedArrays, arrays_in
from geartrain.ams.words import counted

logger = logging.getLogger(__name__)

REGISTER_TIMEOUT_SECONDS = 60.0
_CALL_TIMEOUT_SECONDS = 5.0
_RETRY_SECONDS = 0.2
_OVERHEAD_BYTES = 1024
_MOST_WAITING_THREADS = MAX_CONCURRENT_CALLS // 2
"""Held by synchronous pushes of callers that do not say that they wait."""
_HostedHeader = shard_pb2.ComputeHostedRequest | shard_pb2.UpdateHostedRequest
_SplitHeader = shard_pb2.PushRequest | shard_pb2.AssignRequest | _HostedHeader
"""Of requests that may come in parts."""
_TableHeader = _SplitHeader | shard_pb2.PullRequest
Raw = Mapping[int, memoryview]
"""Raw fields of a message by number."""


class ShardService:
    """The Shard service of one port: decodes, hands to the shard, encodes."""

    def __init__(
        self,
        max_message_bytes: int,
        segments: HeldSegments | None = None,
        bulk: BulkPort | None = None,
        roots: SnapshotRoots | None = None,
    ) -> None:
        self._max_message_bytes = max_message_bytes
        self._roots = SnapshotRoots("server", "127.0.0.1:0", None) if roots is None else roots
        self._parts = PartBuffer()
        self._threads_that_wait = threading.Semaphore(_MOST_WAITING_THREADS)
        self.segments = HeldSegments() if segments is None else segments
        """Memory that clients on this machine share with the shards of this process."""
        self.bulk = BulkPort("127.0.0.1") if bulk is None else bulk
        """Connections of clients to this process for nothing but rows."""
        self._shard: Shard | None = None

    def serve(self, shard: Shard) -> None:
        """From now on, calls go to ``shard``."""
        self._shard = shard

    @property
    def methods(self) -> dict[str, Any]:
        """The methods by name, from encoded request to encoded reply."""
        methods = {
            "CreateTable": self.create_table,
            "DropTable": self.drop_table,
            "PublishTable": self.publish_table,
            "Pull": self.pull,
            "Push": self.push,
            "Assign": self.assign,
            "ComputeHosted": self.compute_hosted,
            "UpdateHosted": self.update_hosted,
            "Describe": self.describe,
            "Freeze": self.freeze,
            "WriteFrozen": self.write_frozen,
            "Thaw": self.thaw,
            "Restore": self.restore,
            "Fence": self.fence,
            "ShareMemory": self.share_memory,
            "OpenBulk": self.open_bulk,
        }
        return {name: self._held_to_the_end(method) for name, method in methods.items()}

    @property
    def waiting_methods(self) -> dict[str, BeginMethod]:
        """How those that may wait for other callers are begun, by name."""
        return {"Push": self.begin_push, "UpdateHosted": self.begin_update_hosted}

    @property
    def shard(self) -> Shard:
        """The shard behind this port. Raises ShardUnavailable before it has registered."""
        if self._shard is None:
            raise ShardUnavailable("this shard has not joined its cluster yet; try again")
        return self._shard

    def create_table(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
        """Make a table."""
        request = framing.parse(data, shard_pb2.CreateTableRequest)
        create = CreateTable(spec=codec.spec_from_pb(request.spec), for_restore=request.for_restore)
        future = self.shard.submit(codec.context_from_pb(request.context), create)
        return _encoded(await_reply(future, servicer_context))

    def drop_table(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
        """Remove a table."""
        request = framing.parse(data, shard_pb2.DropTableRequest)
        drop = DropTable(table=request.table, incarnation=request.incarnation)
        future = self.shard.submit(codec.context_from_pb(request.context), drop)
        return _encoded(await_reply(future, servicer_context))

    def publish_table(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
        """Open a restored table."""
        request = framing.parse(data, shard_pb2.PublishTableRequest)
        publish = PublishTable(table=request.table, incarnation=request.incarnation)
        return _encoded(await_reply(self._submit(request.context, publish), servicer_context))

    def pull(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
        """Read rows."""
        header, raw = framing.decode_framed(data, shard_pb2.PullRequest)
        spec = self._spec(header)
        required_sync = codec.group_from_pb(header.required_sync) if header.HasField("required_sync") else None
        if header.HasField("shared"):
            shared = self._shared(header.shared, spec.dim, spec.numpy_dtype)
            ids, out, present = shared.ids.copy(), shared.rows, shared.present if header.with_present else None
            reply = b""
        else:
            ids = framing.ids_from(raw.get(14))
            self._check_size("one reply", len(ids), spec.row_bytes + 1)
            present = np.zeros(len(ids), np.bool_) if header.with_present else None
            if header.HasField("bulk"):
                reply, out = b"", np.empty((len(ids), spec.dim), spec.numpy_dtype)
            else:
                reply, out = framing.room_for_rows(shard_pb2.PullReply(), len(ids), spec.dim, spec.numpy_dtype)
        pull = Pull(table=header.table, ids=ids, out=out, present=present, required_sync=required_sync)
        await_reply(self.shard.run(codec.context_from_pb(header.context), pull), servicer_context)
        if header.HasField("bulk"):
            with self._bulk_connection(header.bulk, servicer_context) as connection:
                connection.send(header.bulk.use, out)
            return b"" if present is None else framing.encode_framed(shard_pb2.PullReply(), [(14, present)])
        if present is None or header.HasField("shared"):
            return reply
        return framing.encode_framed(shard_pb2.PullReply(), [(14, present), (15, out)])

    def push(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
        """Apply gradients."""
        return self._finished(self.begin_push(data, servicer_context), servicer_context)

    def begin_push(self, data: bytes, servicer_context: grpc.ServicerContext) -> Begun:
        """Begin to apply gradients."""
        header, raw = framing.decode_framed(data, shard_pb2.PushRequest)
        spec = self._spec(header)
        dtype = DTYPES[codec.dtype_from_pb(header.gradient_dtype)]
        whole = self._whole(header, self._payload(header, raw, spec.dim, dtype, servicer_context))
        if whole is None:
            return _incomplete()
        # Our own client sends each id once; a foreign one may not, and the shard's kernels take distinct ids.
        ids, _, gradients = ops.merge_duplicates(*whole)
        push = Push(
            table=header.table,
            ids=ids,
            gradients=gradients,
            lr=header.lr if header.HasField("lr") else None,
            scale=header.scale if header.HasField("scale") else 1.0,
            group=codec.group_from_pb(header.group) if header.HasField("group") else None,
            step_goes_on=header.step_goes_on,
        )
        future = self.shard.run(codec.context_from_pb(header.context), push)
        return Begun(future, self._encoded_to_the_end, waits=push.group is not None)

    def assign(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
        """Overwrite rows."""
        header, raw = framing.decode_framed(data, shard_pb2.AssignRequest)
        spec = self._spec(header)
        whole = self._whole(header, self._payload(header, raw, spec.dim, spec.numpy_dtype, servicer_context))
        if whole is None:
            return shard_pb2.WriteReply(incomplete=True).SerializeToString()
        distinct, _, _ = ops.merge_duplicates(whole[0])
        if len(distinct) != len(whole[0]):
            raise InvalidRows(
                f"{len(whole[0])} ids to assign hold {counted(len(whole[0]) - len(distinct), 'duplicate')}"
            )
        future = self.shard.run(
            codec.context_from_pb(header.context), Assign(table=header.table, ids=whole[0], rows=whole[1])
        )
        return _encoded(await_reply(future, servicer_context))

    def compute_hosted(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
        """Let a hosted model compute."""
        header, raw = framing.decode_framed(data, shard_pb2.ComputeHostedRequest)
        self._spec(header)
        whole, is_whole = self._whole_data(header, raw.get(15))
        if not is_whole:
            return shard_pb2.ComputeHostedReply(incomplete=True).SerializeToString()
        future = self.shard.run(codec.context_from_pb(header.context), hosted.compute_from(header, whole))
        reply = hosted.compute_reply(await_reply(future, servicer_context))
        if len(reply) > self._max_message_bytes:
            raise MessageTooLarge(
                f"the answer takes {len(reply)} bytes, the limit is {self._max_message_bytes}; send a smaller batch "
                "(lower the client's part_bytes), or raise max_message_bytes on both ends"
            )
        return reply

    def update_hosted(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
        """Let a hosted model update its rows."""
        return self._finished(self.begin_update_hosted(data, servicer_context), servicer_context)

    def begin_update_hosted(self, data: bytes, servicer_context: grpc.ServicerContext) -> Begun:  # noqa: ARG002
        """Begin to let a hosted model update its rows."""
        header, raw = framing.decode_framed(data, shard_pb2.UpdateHostedRequest)
        self._spec(header)
        whole, is_whole = self._whole_data(header, raw.get(15))
        if not is_whole:
            return _incomplete()
        update = hosted.update_from(header, whole)
        future = self.shard.run(codec.context_from_pb(header.context), update)
        return Begun(future, self._encoded_to_the_end, waits=update.group is not None)

    def describe(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
        """State of the shard."""
        request = framing.parse(data, shard_pb2.DescribeRequest)
        state = await_reply(self.shard.submit(codec.context_from_pb(request.context), Describe()), servicer_context)
        return codec.state_to_pb(state).SerializeToString()

    def freeze(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
        """Hold tables as they are now."""
        request = framing.parse(data, shard_pb2.FreezeRequest)
        freeze = Freeze(
            snapshot_id=checked_snapshot_id("snapshot_id", request.snapshot_id),
            tables=tuple(request.tables),
            parent_id=checked_snapshot_id("parent_id", request.parent_id, may_be_empty=True),
        )
        return _encoded(await_reply(self._submit(request.context, freeze), servicer_context))

    def write_frozen(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
        """Write what was frozen."""
        request = framing.parse(data, shard_pb2.WriteFrozenRequest)
        write = WriteFrozen(
            snapshot_id=checked_snapshot_id("snapshot_id", request.snapshot_id),
            folder=str(self._roots.resolve(request.folder)),
        )
        written = await_reply(self._submit(request.context, write), servicer_context)
        return shard_pb2.WriteFrozenReply(files=written.files, deltas=written.deltas).SerializeToString()

    def thaw(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
        """End a freeze."""
        request = framing.parse(data, shard_pb2.ThawRequest)
        thaw = Thaw(snapshot_id=checked_snapshot_id("snapshot_id", request.snapshot_id), kept=request.kept)
        return _encoded(await_reply(self._submit(request.context, thaw), servicer_context))

    def restore(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
        """Read rows back."""
        request = framing.parse(data, shard_pb2.RestoreRequest)
        restore = Restore(
            folder=str(self._roots.resolve(request.folder)),
            tables=tuple(request.tables),
            incarnations=tuple(request.incarnations),
        )
        return _encoded(await_reply(self._submit(request.context, restore), servicer_context))

    def fence(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
        """Refuse a job's past."""
        request = framing.parse(data, shard_pb2.FenceRequest)
        fence = Fence(job=request.job, incarnation=request.incarnation, forget=request.forget)
        done = await_reply(self._submit(request.context, fence), servicer_context)
        self._parts.fence(fence.job, fence.incarnation)
        return _encoded(done)

    def share_memory(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:  # noqa: ARG002
        """Open a client's memory."""
        request = framing.parse(data, shard_pb2.ShareMemoryRequest)
        reason = self.segments.open(request.name, request.process, request.descriptor)
        return shard_pb2.ShareMemoryReply(shared=reason is None, reason=reason or "").SerializeToString()

    def open_bulk(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:  # noqa: ARG002
        """Offer a client a connection for rows."""
        framing.parse(data, shard_pb2.OpenBulkRequest)
        try:
            port, number, secret = self.bulk.offer()
        except NotOffered as exc:
            return shard_pb2.OpenBulkReply(reason=str(exc)).SerializeToString()
        return shard_pb2.OpenBulkReply(connection=number, port=port, secret=secret).SerializeToString()

    def _held_to_the_end(self, method: BytesMethod) -> BytesMethod:
        """``method``, but what it did is acknowledged only while the shard is surely this process's."""

        def answer(data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
            reply = method(data, servicer_context)
            self.shard.check_lease()
            return reply

        return answer

    def _encoded_to_the_end(self, done: Done) -> bytes:
        """The reply to a write, if the shard is surely this process's still."""
        reply = _encoded(done)
        self.shard.check_lease()
        return reply

    def _finished(self, begun: Begun, servicer_context: grpc.ServicerContext) -> bytes:
        """The reply of a call that holds a thread until it is there.

        Raises StepPending if so many do that the others would lack one: it goes on, and the same call joins it.
        """
        if not begun.waits or begun.reply.done():
            return begun.encode(await_reply(begun.reply, servicer_context))
        if not self._threads_that_wait.acquire(blocking=False):
            raise StepPending(
                f"{_MOST_WAITING_THREADS} ranks wait for others here; send this push again in a second, with "
                f"{WAITS_KEY}: 1 in its metadata, and it holds no thread"
            )
        try:
            return begun.encode(await_reply(begun.reply, servicer_context))
        finally:
            self._threads_that_wait.release()

    def _submit(self, context: types_pb2.CallContext, request: Request) -> Future[Any]:
        return self.shard.submit(codec.context_from_pb(context), request)

    def _spec(self, header: _TableHeader) -> TableSpec:
        # The fence first: a shard that came back empty has no table, but "restarted" is what the caller must hear.
        context = codec.context_from_pb(header.context)
        self.shard.check_fence(context)
        return self.shard.spec(header.table, context)

    def _shared(self, named: shard_pb2.SharedBytes, dim: int, dtype: np.dtype[Any]) -> SharedArrays:
        theirs = DTYPES[codec.dtype_from_pb(named.dtype)]
        if (named.dim, theirs) != (dim, dtype):
            raise InvalidRows(
                f"{named.num_ids} rows in shared memory are {theirs.name} of width {named.dim}; they must be "
                f"{dtype.name} of width {dim}"
            )
        return arrays_in(self.segments.claim(named.name, named.use), named.num_ids, dim, dtype)

    def _bulk_connection(
        self, named: shard_pb2.BulkBytes, servicer_context: grpc.ServicerContext
    ) -> AbstractContextManager[BulkConnection]:
        return self.bulk.claimed(named.connection, named.use, servicer_context.add_callback)

    def _payload(
        self,
        header: shard_pb2.PushRequest | shard_pb2.AssignRequest,
        raw: Raw,
        dim: int,
        dtype: np.dtype[Any],
        servicer_context: grpc.ServicerContext,
    ) -> Payload:
        """The ids [N] and rows [N, dim] of a write."""
        if header.HasField("bulk"):
            ids = framing.ids_from(raw.get(14))
            self._check_size("one write", len(ids), dim * dtype.itemsize + 8)
            rows = np.empty((len(ids), dim), dtype)
            with self._bulk_connection(header.bulk, servicer_context) as connection:
                connection.receive(header.bulk.use, rows, seconds_to_receive(rows.nbytes))
            return ids, rows
        if not header.HasField("shared"):
            ids = framing.ids_from(raw.get(14))
            return ids, framing.rows_from(raw.get(15), len(ids), dim, dtype)
        shared = self._shared(header.shared, dim, dtype)
        # Ids are copied, for what was checked of them must still be so when they are used. Rows are the caller's until
        # the reply, which for a part comes before the write.
        return shared.ids.copy(), shared.rows.copy() if header.HasField("part") else shared.rows

    def _whole(self, header: _SplitHeader, payload: Payload) -> Payload | None:
        if not header.HasField("part"):
            return payload
        failpoints.reach("shard.parts.before")
        context = codec.context_from_pb(header.context)
        return self._parts.add(context, header.part.index, header.part.count, payload)

    def _whole_data(self, header: _HostedHeader, data: memoryview | None) -> tuple[memoryview | None, bool]:
        """(the data of all parts, True), or (None, False) while some are missing."""
        if not header.HasField("part"):
            return data, True
        piece = np.frombuffer(data if data is not None else b"", np.uint8)
        whole = self._whole(header, (np.empty(0, np.int64), piece))
        return (None, False) if whole is None else (whole[1].data, True)

    def _check_size(self, what: str, num_ids: int, bytes_per_id: int) -> None:
        size = num_ids * bytes_per_id + _OVERHEAD_BYTES
        if size > self._max_message_bytes:
            raise MessageTooLarge(
                f"{num_ids} rows take {size} bytes in {what}, the limit is {self._max_message_bytes}; "
                f"send, or ask for, at most {(self._max_message_bytes - _OVERHEAD_BYTES) // bytes_per_id} ids at once"
            )


def _incomplete() -> Begun:
    """The answer to a part of a write whose other parts are missing."""
    reply: Future[Any] = Future()
    reply.set_result(None)
    return Begun(reply, lambda _: shard_pb2.WriteReply(incomplete=True).SerializeToString())


def _encoded(done: Done) -> bytes:
    failpoints.reach("shard.reply.before")
    return shard_pb2.WriteReply(created=done.created, duplicate=done.duplicate).SerializeToString()


class _HeldShard:
    """One shard of this process: its port, its service and its place in the cluster."""

    def __init__(
        self,
        config: ServerConfig,
        listen: str,
        wanted: int | None,
        models: HostedModels,
        segments: HeldSegments,
        bulk: BulkPort,
        roots: SnapshotRoots,
    ) -> None:
        self.config = config
        self.models = models
        self.wanted = wanted
        self.service = ShardService(config.max_message_bytes, segments, bulk, roots)
        self.server = GrpcServer(listen, config.max_message_bytes)
        self.server.add(SHARD_SERVICE, self.service.methods, waiting=self.service.waiting_methods)
        self.address = config.advertise or _reachable(self.server.address)
        self.incarnation = new_incarnation()
        self.shard: Shard | None = None
        self.lease: Lease | None = None

    @property
    def number(self) -> int:
        """The shard's number, once it has joined."""
        assert self.shard is not None
        return self.shard.shard

    def join(self, scheduler: GrpcSchedulerCarrier) -> None:
        """Register and serve; also how the shard introduces itself to a scheduler that was restarted."""
        known = self.shard
        request = scheduler_pb2.RegisterRequest(
            address=self.address,
            shard=self.wanted if known is None else known.shard,
            incarnation=self.incarnation,
            cluster_version=0 if known is None else known.cluster_version,
            heartbeat_seconds=self.config.heartbeat_seconds,
            tables=[] if known is None else [codec.spec_to_pb(spec) for spec in known.specs],
            highest_incarnation=0 if known is None else known.highest_incarnation,
            restoring_tables=() if known is None else known.restoring_tables,
        )
        began = boot_seconds()
        reply = scheduler.register(request, _CALL_TIMEOUT_SECONDS)
        if known is not None:
            known.cluster_version = reply.cluster_version
            self._confirm(began)
            return
        self.lease = Lease(reply.shard, reply.lease_seconds)
        self.shard = Shard(
            reply.shard,
            buckets_of_shard(even_placement(reply.num_shards), reply.shard),
            incarnation=self.incarnation,
            cluster_version=reply.cluster_version,
            sync_timeout_seconds=self.config.sync_timeout_seconds,
            threads=threads_per_shard(self.config.shards),
            lease=self.lease,
            models=self.models,
        )
        self.service.serve(self.shard)
        self.server.ready()
        logger.info("shard %d of %d serves at %s", reply.shard, reply.num_shards, self.address)

    def beat(self, scheduler: GrpcSchedulerCarrier) -> bool:
        """Send a heartbeat; return False if another process holds the shard now."""
        assert self.shard is not None
        self.service.segments.forget_closed()
        self.service.bulk.forget_closed()
        failpoints.reach("lease.heartbeat.before")
        began = boot_seconds()
        reply = scheduler.heartbeat(
            self.shard.shard,
            self.incarnation,
            _CALL_TIMEOUT_SECONDS,
            highest_incarnation=self.shard.highest_incarnation,
        )
        failpoints.reach("lease.heartbeat.after")
        if reply.replaced:
            return False
        if reply.unknown:
            logger.warning("the scheduler was restarted; shard %d registers again", self.shard.shard)
            self.join(scheduler)
        else:
            self.shard.cluster_version = reply.cluster_version
            self._confirm(began)
        return True

    def close(self, grace_seconds: float) -> None:
        """Finish the calls under way, let go of the port. Idempotent."""
        self.server.stop(grace_seconds)
        if self.shard is not None:
            self.shard.close()

    def _confirm(self, began: float) -> None:
        assert self.lease is not None
        self.lease.confirm(began)


def _reachable(bound: str) -> str:
    """Return an address that others can use: a wildcard is replaced by this machine's name."""
    host, port = split_address(bound)
    return f"{socket.gethostname()}:{port}" if host in ("0.0.0.0", "::") else bound


class ShardServer:
    """A process's shards: start, serve until stopped. Not thread-safe; use from one thread."""

    def __init__(self, config: ServerConfig, models: HostedModels = MappingProxyType({})) -> None:
        """Hold the shards that ``config`` names; they host ``models``. Raises ConfigError."""
        self._config = config
        self._roots = SnapshotRoots("server", config.listen, config.snapshot_roots)
        self._models = models
        self._segments = HeldSegments()
        self._bulk = BulkPort(split_address(config.listen)[0], config.bulk_port)
        self._scheduler = GrpcSchedulerCarrier(config.scheduler, max_message_bytes=config.max_message_bytes)
        self._held: list[_HeldShard] = []
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._hearts: list[threading.Thread] = []
        """One for each shard."""
        self._ending = threading.Lock()
        self._end_reasons: list[str] = []
        """Why shards are served no more."""
        self._pulse = threading.Thread(target=self._run_pulse, name="pulse", daemon=True)
        self.end_reason: str | None = None
        """Why it ended by itself; None if it did not."""
        self._started = False

    def start(self) -> list[str]:
        """Bind, register, serve; return the address of each shard.

        Raises ConfigError (port in use, shard held by another process) or SchedulerUnavailable.
        """
        keep_large_buffers()
        limit_row_memory(self._config.memory_bytes)
        host, _ = split_address(self._config.listen)
        host = f"[{host}]" if ":" in host else host
        try:
            for index in range(self._config.shards):
                listen = self._config.listen if index == 0 else f"{host}:0"
                if self._config.ports is not None:
                    listen = f"{host}:{self._config.ports[index]}"
                wanted = None if self._config.shard is None else self._config.shard + index
                held = _HeldShard(self._config, listen, wanted, self._models, self._segments, self._bulk, self._roots)
                self._held.append(held)
                held.server.start()
            self._join_all()
        except BaseException:
            self.stop(0)
            raise
        for held in self._held:
            name = f"heartbeat-{held.number}"
            self._hearts.append(threading.Thread(target=self._beat, args=(held,), name=name, daemon=True))
        for heart in self._hearts:
            heart.start()
        self._pulse.start()
        self._started = True
        return [held.address for held in self._held]

    @property
    def bound_addresses(self) -> list[str]:
        """Where each shard listens; clients may know it by another address (``advertise``)."""
        return [held.server.address for held in self._held]

    @property
    def shards(self) -> list[int]:
        """The numbers of the shards held."""
        return [held.shard.shard for held in self._held if held.shard is not None]

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Block until the server has ended by itself or was stopped; False if the time ran out first."""
        return self._ended.wait(timeout_seconds)

    def stop(self, grace_seconds: float = 5.0) -> None:
        """Leave the cluster, finish the calls under way, end. Idempotent."""
        self._stopping.set()
        if self._started:
            for thread in (*self._hearts, self._pulse):
                thread.join()
        for held in self._held:
            if held.shard is not None:
                try:
                    self._scheduler.leave(held.shard.shard, held.incarnation, timeout_seconds=1.0)
                except (GeartrainError, AttemptFailed) as exc:
                    logger.info("left without telling the scheduler: %s", exc)
            held.close(grace_seconds)
        self._held.clear()
        self._bulk.close()
        self._scheduler.close()
        self._ended.set()

    def _join_all(self) -> None:
        deadline = time.monotonic() + REGISTER_TIMEOUT_SECONDS
        is_told = False
        for held in self._held:
            while True:
                try:
                    held.join(self._scheduler)
                    break
                except ClusterNotReady as exc:
                    if time.monotonic() > deadline:
                        raise
                    if not is_told:
                        logger.info("waiting: %s", exc)
                    is_told = True
                    if self._stopping.wait(_RETRY_SECONDS):
                        raise
                except AttemptFailed as exc:
                    if time.monotonic() > deadline:
                        raise SchedulerUnavailable(
                            f"{exc} (for {REGISTER_TIMEOUT_SECONDS:g} s); "
                            "start 'geartrain scheduler' first, or correct --scheduler"
                        ) from exc
                    if not is_told:
                        logger.warning("%s; tries again for %g s", exc, REGISTER_TIMEOUT_SECONDS)
                    is_told = True
                    if self._stopping.wait(_RETRY_SECONDS):
                        raise SchedulerUnavailable("stopped before the scheduler answered") from exc

    @property
    def _leases(self) -> list[Lease]:
        return [held.lease for held in self._held if held.lease is not None]

    def _run_pulse(self) -> None:
        interval = min(lease.seconds for lease in self._leases) / PULSES_PER_LEASE
        while not self._stopping.wait(interval):
            for lease in self._leases:
                lease.pulse()

    def _beat(self, held: _HeldShard) -> None:
        """Say again and again that one shard lives; what keeps its heartbeats up costs no other shard its lease."""
        assert held.lease is not None
        silent = False
        interval = min(self._config.heartbeat_seconds, held.lease.seconds / BEATS_PER_LEASE)
        while not self._stopping.wait(interval):
            try:
                if not held.beat(self._scheduler):
                    self._end(held, f"shard {held.number} was taken over by another process while this one was silent")
                    return
                silent = False
            except AttemptFailed as exc:
                if not silent:
                    logger.warning("the scheduler does not answer, serving shard %d on: %s", held.number, exc)
                silent = True
            except ConfigError as exc:
                self._end(held, f"the scheduler refuses shard {held.number}: {exc}")
                return
            except GeartrainError as exc:
                logger.warning("heartbeat of shard %d failed: %s", held.number, exc)
            except Exception:  # a defect here must not cost the shard its lease
                logger.exception("heartbeat of shard %d failed", held.number)

    def _end(self, held: _HeldShard, reason: str) -> None:
        """Serve one shard no more and forget its rows, which are nobody's now; the server ends with the last."""
        assert held.lease is not None
        held.lease.revoke(f"{reason}; ask the scheduler again")
        with self._ending:
            self._end_reasons.append(reason)
            left = [one for one in self._held if one is not held]
            self._held = left or self._held
        if left:
            logger.error("%s; this process serves on with %s", reason, ", ".join(str(one.number) for one in left))
            held.close(0)
            return
        self.end_reason = "; ".join(self._end_reasons)
        self._ended.set()
