"""gRPC service of a shard: decoding, dispatch and encoding of its RPCs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from geartrain.ams.kernels import ops
from geartrain.ams.observe import failpoints
from geartrain.ams.pb.v1 import shard_pb2
from geartrain.ams.rpc.channel import WAITS_KEY
from geartrain.ams.rpc.codec import framing, hosted
from geartrain.ams.rpc.codec import specs as codec
from geartrain.ams.rpc.ping import PingHandler
from geartrain.ams.rpc.server.access import GRANT
from geartrain.ams.rpc.server.binding import Call, bind
from geartrain.ams.rpc.server.server import MAX_CONCURRENT_CALLS, BytesMethod, ServedMethods, await_reply, done_here
from geartrain.ams.rpc.server.waiting import ActiveCall, BeginMethod
from geartrain.ams.rpc.services import SHARD, context_from_pb
from geartrain.ams.server.chunked_writes import PartBuffer, Payload
from geartrain.ams.server.data_plane import DataPlanePort
from geartrain.ams.server.shard import Shard
from geartrain.ams.storage.snapshot.roots import SnapshotRoots, checked_snapshot_id
from geartrain.ams.values.errors import (
    GeartrainError,
    InvalidRows,
    MessageTooLarge,
    ShardUnavailable,
    StepPending,
)
from geartrain.ams.values.rpc import Ping
from geartrain.ams.values.shard_messages import (
    AlterTable,
    Assign,
    BatchFacts,
    CallContext,
    ComputeHosted,
    CreateTable,
    DataPlaneOffer,
    Describe,
    Done,
    DropTable,
    Expire,
    Fence,
    Freeze,
    OpenDataPlane,
    PublishTable,
    Pull,
    Push,
    Remove,
    Request,
    Restore,
    Thaw,
    UpdateHosted,
    WriteFrozen,
)
from geartrain.ams.values.specs import DTYPES, Ids

_OVERHEAD_BYTES = 1024
_MAX_WAITING_THREADS = MAX_CONCURRENT_CALLS // 2
"""Most threads held by synchronous pushes that are not marked as waiting."""
_HostedHeader = shard_pb2.ComputeHostedRequest | shard_pb2.UpdateHostedRequest
_SplitHeader = shard_pb2.PushRequest | shard_pb2.AssignRequest | _HostedHeader
"""Headers of requests that may come in parts."""
Raw = Mapping[int, memoryview]
"""Raw fields of a message by number."""


class ShardService:
    """Shard service of one port: decodes, calls the shard, encodes."""

    def __init__(
        self,
        max_message_bytes: int,
        roots: SnapshotRoots | None = None,
        *,
        host: str = "",
        port: int = 0,
        uses_tls: bool = False,
        cpus: Sequence[int] = (),
    ) -> None:
        self._max_message_bytes = max_message_bytes
        self._roots = SnapshotRoots("server", "127.0.0.1:0", None) if roots is None else roots
        self._parts = PartBuffer()
        self._threads_that_wait = threading.Semaphore(_MAX_WAITING_THREADS)
        self._shard: Shard | None = None
        self.data_plane = DataPlanePort(lambda: self.shard, host, port, uses_tls=uses_tls, cpus=cpus)
        """Port of clients' connections for pulls, pushes and assigns."""

    def serve(self, shard: Shard) -> None:
        """Direct calls to ``shard`` from now on."""
        self._shard = shard

    def close(self) -> None:
        """Close the connections for rows. Idempotent."""
        self.data_plane.close()

    @cached_property
    def bound(self) -> ServedMethods:
        """Service with its handlers."""
        service, methods, *_ = bind(
            SHARD,
            {
                Ping: PingHandler("server", self._incarnation),
                CreateTable: self._call_shard,
                AlterTable: self._call_shard,
                DropTable: self._call_shard,
                PublishTable: self._call_shard,
                Describe: self._call_shard,
                Freeze: self._freeze,
                WriteFrozen: self._write_frozen,
                Thaw: self._thaw,
                Restore: self._restore,
                Fence: self._fence,
                Remove: self._call_shard,
                Expire: self._call_shard,
                OpenDataPlane: self._open_data_plane,
            },
            {
                Pull: self.pull,
                Push: self.push,
                Assign: self.assign,
                ComputeHosted: self.compute_hosted,
                UpdateHosted: self.update_hosted,
            },
        )
        held = {name: self._held_to_the_end(method) for name, method in methods.items()}
        ping = SHARD[Ping].name  # answered even if another process holds the shard
        return ServedMethods(service, {**held, ping: methods[ping]})

    @property
    def waiting_methods(self) -> dict[str, BeginMethod]:
        """Start functions of the methods that may wait for other callers, by name."""
        return {"Push": self.start_push, "UpdateHosted": self.start_update_hosted}

    @property
    def shard(self) -> Shard:
        """Shard of this port. Raises ShardUnavailable before it has registered."""
        if self._shard is None:
            raise ShardUnavailable("this shard has not joined its cluster yet; try again")
        return self._shard

    def _incarnation(self) -> int:
        return 0 if self._shard is None else self._shard.incarnation

    def _call_shard(self, request: Request, call: Call) -> Any:
        """Return the shard's reply."""
        return _acknowledged(await_reply(self.shard.run(call.context, request), call.servicer))

    def _freeze(self, freeze: Freeze, call: Call) -> Any:
        checked_snapshot_id("snapshot_id", freeze.snapshot_id)
        checked_snapshot_id("parent_id", freeze.parent_id, may_be_empty=True)
        return self._call_shard(freeze, call)

    def _write_frozen(self, write: WriteFrozen, call: Call) -> Any:
        checked_snapshot_id("snapshot_id", write.snapshot_id)
        return self._call_shard(replace(write, folder=self._roots.resolve(write.folder, call.user)), call)

    def _thaw(self, thaw: Thaw, call: Call) -> Any:
        checked_snapshot_id("snapshot_id", thaw.snapshot_id)
        return self._call_shard(thaw, call)

    def _restore(self, restore: Restore, call: Call) -> Any:
        return self._call_shard(replace(restore, folder=self._roots.resolve(restore.folder, call.user)), call)

    def _fence(self, fence: Fence, call: Call) -> Any:
        done = self._call_shard(fence, call)
        self._parts.fence(fence.job, fence.incarnation)
        return done

    def _open_data_plane(self, _: OpenDataPlane, __: Call) -> DataPlaneOffer:
        return self.data_plane.offer(GRANT.get())

    def pull(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
        """Read rows."""
        header, raw, context = _split(Pull, data)
        with _of_its_past(self.shard, header.table, context):
            spec = self.shard.spec(header.table)
            ids = framing.ids_from(raw.get(14))
            dtype = DTYPES[codec.dtype_from_pb(header.row_dtype)] if header.HasField("row_dtype") else spec.numpy_dtype
            self._check_size("one reply", len(ids), spec.dim * dtype.itemsize + 1)
            present = np.zeros(len(ids), np.bool_) if header.with_present else None
            room = framing.ReplyRoom(len(ids), spec.dim, dtype)
            pull = SHARD[Pull].header.from_message(header, ids=ids, out=room.rows, present=present)
        writes = done_here(lambda waiter: self.shard.pull(context, pull, waiter), servicer_context).writes
        if present is None:
            room.write_field(shard_pb2.PullReply.WRITES_FIELD_NUMBER, writes)
            return room.data
        return framing.encode_framed(shard_pb2.PullReply(writes=writes), [(14, present), (15, room.rows)])

    def push(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
        """Apply gradients."""
        asked = self._asked_push(data)
        if asked is None:
            return _INCOMPLETE
        if asked[1].group is not None:
            return self._finished(self._begun_push(*asked), servicer_context)
        return self._written(*asked, servicer_context)

    def start_push(self, data: bytes, servicer_context: grpc.ServicerContext) -> ActiveCall:  # noqa: ARG002
        """Start to apply gradients."""
        asked = self._asked_push(data)
        return _incomplete() if asked is None else self._begun_push(*asked)

    def _begun_push(self, context: CallContext, push: Push) -> ActiveCall:
        return self._begun(context, _with_distinct_ids(push))

    def _asked_push(self, data: bytes) -> tuple[CallContext, Push] | None:
        """Return the caller and its push; None: parts of it are missing."""
        header, raw, context = _split(Push, data)
        with _of_its_past(self.shard, header.table, context):
            dim, dtype = self.shard.spec(header.table).dim, DTYPES[codec.dtype_from_pb(header.gradient_dtype)]
            ids, rows = _payload(raw, dim, dtype)
            if not header.HasField("part"):
                return context, SHARD[Push].header.from_message(header, ids=ids, gradients=rows)
            whole = self._whole(header, context, (ids, rows, _occurrences(header, len(ids))))
            if whole is None:
                return None
            push = SHARD[Push].header.from_message(header, ids=whole[0], gradients=whole[1])
            if push.batch is not None:
                push = replace(push, batch=replace(push.batch, occurrences=whole[2]))
            return context, push

    def _written(self, context: CallContext, write: Push | Assign, servicer_context: grpc.ServicerContext) -> bytes:
        done = done_here(lambda waiter: self.shard.write(context, write, waiter), servicer_context)
        return _encoded(await_reply(done, servicer_context) if isinstance(done, Future) else done)

    def assign(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
        """Overwrite rows."""
        header, raw, context = _split(Assign, data)
        with _of_its_past(self.shard, header.table, context):
            spec = self.shard.spec(header.table)
            whole = self._whole(header, context, _payload(raw, spec.dim, spec.numpy_dtype))
            if whole is None:
                return _INCOMPLETE
            assign = SHARD[Assign].header.from_message(header, ids=whole[0], rows=whole[1])
        return self._written(context, assign, servicer_context)

    def compute_hosted(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
        """Compute with a hosted model."""
        begun = self._start_hosted(ComputeHosted, data)
        if begun is None:
            return shard_pb2.ComputeHostedReply(incomplete=True).SerializeToString()
        reply = SHARD[ComputeHosted].reply.encode(await_reply(begun.reply, servicer_context))
        if len(reply) > self._max_message_bytes:
            raise MessageTooLarge(
                f"the answer takes {len(reply)} bytes, the limit is {self._max_message_bytes}; send a smaller batch "
                "(lower the client's part_bytes), or raise max_message_bytes on both ends"
            )
        return reply

    def update_hosted(self, data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
        """Update rows by a hosted model."""
        return self._finished(self.start_update_hosted(data, servicer_context), servicer_context)

    def start_update_hosted(self, data: bytes, servicer_context: grpc.ServicerContext) -> ActiveCall:  # noqa: ARG002
        """Start to update rows by a hosted model."""
        return self._start_hosted(UpdateHosted, data) or _incomplete()

    def _start_hosted(self, kind: type[ComputeHosted | UpdateHosted], data: bytes) -> ActiveCall | None:
        """Start a request to a hosted model; None: parts of it are missing."""
        header, raw, context = _split(kind, data)
        with _of_its_past(self.shard, header.table, context):
            self.shard.spec(header.table)
            whole, is_whole = self._whole_data(header, context, raw.get(15))
            if not is_whole:
                return None
            inputs = hosted.decode_inputs(header.inputs, whole)
            request = SHARD[kind].header.from_message(header, inputs=inputs)
        return self._begun(context, request)

    def _begun(self, context: CallContext, request: Push | ComputeHosted | UpdateHosted) -> ActiveCall:
        waits = not isinstance(request, ComputeHosted) and request.group is not None
        return ActiveCall(self.shard.run(context, request), self._encoded_to_the_end, waits=waits)

    def _held_to_the_end(self, method: BytesMethod) -> BytesMethod:
        """Return ``method`` with a check before its reply that this process still holds the shard."""

        def answer(data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
            reply = method(data, servicer_context)
            self.shard.check_lease()
            return reply

        return answer

    def _encoded_to_the_end(self, done: Done) -> bytes:
        """Return the reply to a write, if this process surely still holds the shard."""
        reply = _encoded(done)
        self.shard.check_lease()
        return reply

    def _finished(self, begun: ActiveCall, servicer_context: grpc.ServicerContext) -> bytes:
        """Return the reply of a call that holds a thread until it is there.

        Raises StepPending if so many calls do that the others would lack threads: the call goes on, and a retry joins
        it.
        """
        if not begun.waits or begun.reply.done():
            return begun.encode(await_reply(begun.reply, servicer_context))
        if not self._threads_that_wait.acquire(blocking=False):
            raise StepPending(
                f"{_MAX_WAITING_THREADS} ranks wait for others here; send this push again in a second, with "
                f"{WAITS_KEY}: 1 in its metadata, and it holds no thread"
            )
        try:
            return begun.encode(await_reply(begun.reply, servicer_context))
        finally:
            self._threads_that_wait.release()

    def _whole(self, header: _SplitHeader, context: CallContext, payload: Payload) -> Payload | None:
        if not header.HasField("part"):
            return payload
        failpoints.reach("shard.parts.before")
        self.shard.check_meant(header.table, context)  # now, as the part is held until the others come
        return self._parts.add(context, header.part.index, header.part.count, payload)

    def _whole_data(
        self, header: _HostedHeader, context: CallContext, data: memoryview | None
    ) -> tuple[memoryview | None, bool]:
        """Return (the data of all parts, True), or (None, False) while some are missing."""
        if not header.HasField("part"):
            return data, True
        piece = np.frombuffer(data if data is not None else b"", np.uint8)
        whole = self._whole(header, context, (np.empty(0, np.int64), piece))
        return (None, False) if whole is None else (whole[1].data, True)

    def _check_size(self, what: str, num_ids: int, bytes_per_id: int) -> None:
        size = num_ids * bytes_per_id + _OVERHEAD_BYTES
        if size > self._max_message_bytes:
            raise MessageTooLarge(
                f"{num_ids} rows take {size} bytes in {what}, the limit is {self._max_message_bytes}; "
                f"send, or ask for, at most {(self._max_message_bytes - _OVERHEAD_BYTES) // bytes_per_id} ids at once"
            )


@contextmanager
def _of_its_past(shard: Shard, table: str, context: CallContext) -> Iterator[None]:
    """On an error, first check the incarnations that the caller expects: a shard that came back empty raises
    "restarted" rather than "no such table".

    The shard checks those of a valid request in the request's turn.
    """
    try:
        yield
    except GeartrainError:
        shard.check_meant(table, context)
        raise


def _split(kind: type[Request], data: bytes) -> tuple[Any, Raw, CallContext]:
    """Return the header of a request with rows, its raw fields by number, and the caller."""
    header, raw = framing.decode_framed(data, SHARD[kind].header.message)
    return header, raw, context_from_pb(header.context)  # type: ignore[attr-defined]


def _with_distinct_ids(push: Push) -> Push:
    """Return the push with equal ids merged: foreign clients may repeat them, ours does not."""
    ids, places, gradients = ops.merge_duplicates(push.ids, push.gradients)
    if len(ids) == len(push.ids):
        return push
    batch = BatchFacts() if push.batch is None else push.batch
    if batch.occurrences is not None:
        _require_one_each(batch.occurrences, len(places))
    occurrences = np.bincount(places, batch.occurrences, len(ids))
    batch = replace(batch, occurrences=np.minimum(occurrences, 2**32 - 1).astype(np.uint32))
    return replace(push, ids=ids, gradients=gradients, batch=batch)


def _occurrences(header: shard_pb2.PushRequest, num_ids: int) -> npt.NDArray[np.uint32]:
    """Return the occurrences of the ids of one part [N], 1 where none are given. Raises InvalidRows."""
    said = np.frombuffer(header.batch.occurrences, "<u4") if header.batch.occurrences else np.ones(num_ids, np.uint32)
    _require_one_each(said, num_ids)
    return said


def _require_one_each(occurrences: npt.NDArray[np.uint32], num_ids: int) -> None:
    if len(occurrences) != num_ids:
        raise InvalidRows(f"{len(occurrences)} occurrences for {num_ids} ids; there must be one per id")


def _payload(raw: Raw, dim: int, dtype: np.dtype[Any]) -> tuple[Ids, npt.NDArray[Any]]:
    """Return the ids [N] and rows [N, dim] of a write."""
    ids = framing.ids_from(raw.get(14))
    return ids, framing.rows_from(raw.get(15), len(ids), dim, dtype)


_INCOMPLETE = SHARD[Push].reply.encode(Done(incomplete=True))
"""Reply to a part of a write whose other parts are missing."""


def _incomplete() -> ActiveCall:
    reply: Future[Any] = Future()
    reply.set_result(None)
    return ActiveCall(reply, lambda _: _INCOMPLETE)


def _encoded(done: Done) -> bytes:
    return SHARD[Push].reply.encode(_acknowledged(done))


def _acknowledged(reply: Any) -> Any:
    if isinstance(reply, Done):
        failpoints.reach("shard.reply.before")
    return reply
