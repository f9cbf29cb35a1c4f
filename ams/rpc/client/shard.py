"""gRPC carrier from a client to a shard, on this machine or another."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import grpc

from geartrain.ams.rpc.carrier import AttemptFailed
from geartrain.ams.rpc.channel import CONNECT_SECONDS, PING_SECONDS, WAITS_KEY, channel_options
from geartrain.ams.rpc.client.data_plane import DataPlane
from geartrain.ams.rpc.codec import hosted
from geartrain.ams.rpc.credentials import Credentials
from geartrain.ams.rpc.services import SHARD, context_to_pb
from geartrain.ams.rpc.status import error_from
from geartrain.ams.values.config import MAX_MESSAGE_BYTES, MIB
from geartrain.ams.values.errors import GeartrainError, InternalError
from geartrain.ams.values.shard_messages import (
    CallContext,
    ComputeHosted,
    DataPlaneOffer,
    Done,
    OpenDataPlane,
    Reply,
    Request,
    UpdateHosted,
)

logger = logging.getLogger(__name__)

_WAITS = ((WAITS_KEY, "1"),)


class _Connection:
    """Channel and its calls under way; closed once it is retired and the last of them has ended."""

    def __init__(self, address: str, options: list[tuple[str, Any]], shard: int | None) -> None:
        self.channel = Credentials.mine(address).channel(address, options, SHARD.role, shard)
        self.methods: dict[str, Any] = {
            method.name: self.channel.unary_unary(method.path) for _, method in SHARD.items()
        }
        self.calls = 0
        self.is_retired = False


class GrpcCarrier:
    """Carrier to one shard over gRPC. Requests larger than ``part_bytes`` travel in parts.

    The peer's certificate must be of that ``shard``, or of any; None: any server's is accepted. Rows travel by its
    :attr:`data_plane`. A gRPC call waits ``connect_seconds`` for a connection: few if the caller retries, more if it
    does not.
    """

    engine = None
    """None: the shard is in another process."""

    def __init__(
        self,
        address: str,
        shard: int | None = None,
        *,
        part_bytes: int = 16 * MIB,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        shared_memory: bool = True,
        connect_seconds: float = CONNECT_SECONDS,
        ping_seconds: float = PING_SECONDS,
    ) -> None:
        self._address = address
        self._part_bytes = part_bytes
        self._options = channel_options(max_message_bytes, connect_seconds, ping_seconds)
        self._lock = threading.Lock()
        self._shard = shard
        self._connection = _Connection(address, self._options, shard)
        self._is_closed = False
        needs_tls = bool(Credentials.mine(address).names)
        self.data_plane = DataPlane(address, self._request_offer, shares_memory=shared_memory, needs_tls=needs_tls)

    def submit(
        self, context: CallContext, request: Request, timeout_seconds: float | None, *, alone: bool = False
    ) -> Future[Reply]:
        if isinstance(request, ComputeHosted | UpdateHosted):
            return self._hosted(context, request, timeout_seconds, alone=alone)
        method = SHARD[type(request)]
        return self._call(method.name, method.encode(request, context), timeout_seconds, method.reply.decode)

    def close(self) -> None:
        """Close the connection; calls under way fail with AttemptFailed."""
        with self._lock:
            self._is_closed = True
        self.data_plane.close()
        self._connection.channel.close()

    def _acquire(self) -> _Connection:
        with self._lock:
            self._connection.calls += 1
            return self._connection

    def _release(self, connection: _Connection, *, timed_out: bool) -> None:
        """End a call on a connection. After a timeout the connection may be dead: the next call opens another."""
        with self._lock:
            connection.calls -= 1
            if timed_out and connection is self._connection and not self._is_closed:
                connection.is_retired = True
                self._connection = _Connection(self._address, self._options, self._shard)
            is_unused = connection.is_retired and connection.calls == 0
        if is_unused:
            connection.channel.close()

    def _call(
        self,
        method: str,
        data: bytes,
        timeout_seconds: float | None,
        decode: Callable[[bytes], Reply],
        *,
        alone: bool = False,
        may_retire: bool = True,
        waits: bool = False,
    ) -> Future[Reply]:
        """Start a call.

        Without ``may_retire`` the connection is kept after a timeout. ``waits`` marks a call that is answered late, as
        it waits for other callers.
        """
        future: Future[Reply] = Future()
        connection = self._acquire()
        send = connection.methods[method]
        metadata = _WAITS if waits else None

        def resolve(reply: Callable[[], bytes]) -> None:
            timed_out = False
            outcome: Reply | Exception
            try:
                outcome = decode(reply())
            except grpc.RpcError as exc:
                timed_out = isinstance(exc, grpc.Call) and exc.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                outcome = error_from(exc, f"shard at {self._address}")
            except (grpc.FutureCancelledError, _ChannelClosed):
                outcome = AttemptFailed(f"shard at {self._address}: the connection is closed")
            except GeartrainError as exc:
                outcome = exc
            except Exception as exc:  # a defect here must not leave the caller waiting for ever
                outcome = InternalError(f"reply of the shard at {self._address}: {exc!r}")
            except BaseException:  # Ctrl-C
                self._release(connection, timed_out=False)
                raise
            self._release(
                connection, timed_out=timed_out and may_retire
            )  # first, so that a retry finds the next connection
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        if alone:
            resolve(lambda: _unless_closed(send, data, timeout_seconds, metadata))
            return future
        try:
            call = _unless_closed(send.future, data, timeout_seconds, metadata)
        except BaseException as exc:
            self._release(connection, timed_out=False)
            if not isinstance(exc, _ChannelClosed):
                raise
            future.set_exception(AttemptFailed(f"shard at {self._address}: the connection is closed"))
            return future
        # The callback runs on a gRPC thread, so that replies of several shards are decoded in parallel.
        call.add_done_callback(lambda call: resolve(call.result))
        return future

    def _hosted(
        self, context: CallContext, request: ComputeHosted | UpdateHosted, timeout_seconds: float | None, *, alone: bool
    ) -> Future[Reply]:
        method = SHARD[type(request)]
        header: Any = method.header.to_message(request, context=context_to_pb(context))
        messages = hosted.in_parts(header, request.inputs, self._part_bytes)
        whole = alone and len(messages) == 1
        waits = isinstance(request, UpdateHosted) and request.group is not None
        parts = [
            self._call(method.name, data, timeout_seconds, method.reply.decode, alone=whole, waits=waits)
            for data in messages
        ]
        return parts[0] if len(parts) == 1 else _joined(parts)

    def _request_offer(self, seconds: float) -> DataPlaneOffer:
        """Ask the shard for a connection of the data plane. Raises its GeartrainError, or AttemptFailed."""
        method = SHARD[OpenDataPlane]
        ask = method.encode(OpenDataPlane())
        reply: Any = self._call(method.name, ask, seconds, method.reply.decode, may_retire=False).result()
        return reply  # type: ignore[no-any-return]


class _ChannelClosed(Exception):
    """The channel was closed before the call."""


def _unless_closed(send: Callable[..., Any], data: bytes, timeout_seconds: float | None, metadata: Any) -> Any:
    try:
        return send(data, timeout=timeout_seconds, metadata=metadata)
    except ValueError as exc:  # raised by gRPC for a closed channel
        raise _ChannelClosed from exc


def _joined(parts: list[Future[Reply]]) -> Future[Reply]:
    """Return the reply to a request in parts: that to the last part, or the first error."""
    joint: Future[Reply] = Future()
    left = len(parts)
    lock = threading.Lock()

    def part_done(_: Future[Reply]) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        error = next((e for part in parts if (e := part.exception()) is not None), None)
        replies = [part.result() for part in parts] if error is None else []
        complete = [reply for reply in replies if not (isinstance(reply, Done) and reply.incomplete)]
        if complete:
            joint.set_result(complete[-1])
        else:
            lost = AttemptFailed("the shard kept all parts of a request and waits for more")
            joint.set_exception(error or lost)

    for part in parts:
        part.add_done_callback(part_done)
    return joint
