"""A shard behind gRPC: what its RPCs decode, ask and answer."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any

import grpc
import numpy as np

from geartrain.ams.kernels import ops
from geartrain.ams.observe import failpoints
from geartrain.ams.pb.v1 import shard_pb2, types_pb2
from geartrain.ams.rpc import codec, framing
from geartrain.ams.rpc import hosted_codec as hosted
from geartrain.ams.rpc.payload.bulk import BulkConnection, BulkPort, NotOffered, seconds_to_receive
from geartrain.ams.rpc.payload.shared_memory import HeldSegments, SharedArrays, arrays_in
from geartrain.ams.rpc.server import MAX_CONCURRENT_CALLS, BytesMethod, await_reply
from geartrain.ams.rpc.shard_client import WAITS_KEY
from geartrain.ams.rpc.waiting import BeginMethod, Begun
from geartrain.ams.server.parts import PartBuffer, Payload
from geartrain.ams.server.shard import Shard
from geartrain.ams.storage.snapshot.roots import SnapshotRoots, checked_snapshot_id
from geartrain.ams.values.errors import (
    InvalidRows,
    MessageTooLarge,
    ShardUnavailable,
    StepPending,
)
from geartrain.ams.values.messages import (
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
from geartrain.ams.values.specs import DTYPES, TableSpec
from geartrain.ams.values.text import counted

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
        return _encoded(await_reply(self._run(request.context, publish), servicer_context))

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
        return _encoded(await_reply(self._run(request.context, freeze), servicer_context))

    def write_frozen(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
        """Write what was frozen."""
        request = framing.parse(data, shard_pb2.WriteFrozenRequest)
        write = WriteFrozen(
            snapshot_id=checked_snapshot_id("snapshot_id", request.snapshot_id),
            folder=str(self._roots.resolve(request.folder)),
        )
        written = await_reply(self._run(request.context, write), servicer_context)
        return shard_pb2.WriteFrozenReply(files=written.files, deltas=written.deltas).SerializeToString()

    def thaw(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
        """End a freeze."""
        request = framing.parse(data, shard_pb2.ThawRequest)
        thaw = Thaw(snapshot_id=checked_snapshot_id("snapshot_id", request.snapshot_id), kept=request.kept)
        return _encoded(await_reply(self._run(request.context, thaw), servicer_context))

    def restore(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
        """Read rows back."""
        request = framing.parse(data, shard_pb2.RestoreRequest)
        restore = Restore(
            folder=str(self._roots.resolve(request.folder)),
            tables=tuple(request.tables),
            incarnations=tuple(request.incarnations),
        )
        return _encoded(await_reply(self._run(request.context, restore), servicer_context))

    def fence(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
        """Refuse a job's past."""
        request = framing.parse(data, shard_pb2.FenceRequest)
        fence = Fence(job=request.job, incarnation=request.incarnation, forget=request.forget)
        done = await_reply(self._run(request.context, fence), servicer_context)
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

    def _run(self, context: types_pb2.CallContext, request: Request) -> Future[Any]:
        return self.shard.run(codec.context_from_pb(context), request)

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
