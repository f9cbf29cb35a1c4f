"""Calls to one service of a role over gRPC: a request's value in, its reply's value out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import grpc

from geartrain.ams.rpc.carrier import AttemptFailed, NotSent
from geartrain.ams.rpc.channel import CONNECT_SECONDS, channel_options
from geartrain.ams.rpc.credentials import Credentials
from geartrain.ams.rpc.services import Service
from geartrain.ams.rpc.status import error_from
from geartrain.ams.values.config import MAX_MESSAGE_BYTES
from geartrain.ams.values.interrupts import uninterrupted
from geartrain.ams.values.rpc import Rpc

R = TypeVar("R")
AwaitReply = Callable[[], R]
"""Function that waits for the reply of a call; may raise the service's GeartrainError, or AttemptFailed."""


class GrpcCalls:
    """Calls to one service of the role at an address. Thread-safe.

    Every call may raise the role's GeartrainError, or AttemptFailed. It waits ``connect_seconds`` for a connection: few
    if the caller retries, more if it does not. With ``any_role`` a certificate of any role of the cluster is accepted,
    not only of the service's. During the wait for a reply :meth:`waited` is called, after ``pauses[0]`` seconds and
    then each time after twice as long, up to ``pauses[1]``.
    """

    pauses: tuple[float, float] | None = None

    def __init__(
        self,
        service: Service,
        role: str,
        address: str,
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        connect_seconds: float = CONNECT_SECONDS,
        any_role: bool = False,
    ) -> None:
        self.address = address
        self._service = service
        self._peer = f"{role} at {address}"
        options = channel_options(max_message_bytes, connect_seconds)
        self._channel = Credentials.mine(address).channel(address, options, None if any_role else service.role)

    def call(self, request: Rpc[R], timeout_seconds: float | None) -> R:
        """Return the reply to a request."""
        method = self._service[type(request)]
        data = uninterrupted(partial(self._reply, method.path, method.encode(request), timeout_seconds))
        reply: R = method.reply.decode(data)
        return reply

    def start(self, request: Rpc[R], timeout_seconds: float | None) -> AwaitReply[R]:
        """Send a request and return the function that waits for the reply. Raises NotSent."""
        method = self._service[type(request)]
        reply = self.start_bytes(method.path, method.encode(request), timeout_seconds)
        return lambda: method.reply.decode(reply())

    def stream(self, request: Rpc[R]) -> Iterator[R]:
        """Yield the replies to a request."""
        method = self._service[type(request)]
        for data in self.stream_bytes(method.path, method.encode(request)):
            yield method.reply.decode(data)

    def close(self) -> None:
        """Close the channel. Idempotent."""
        uninterrupted(self._channel.close)

    def waited(self, call: Any, timeout_seconds: float | None) -> None:
        """React to a missing reply; does nothing here."""

    def start_bytes(self, path: str, data: bytes, timeout_seconds: float | None) -> AwaitReply[bytes]:
        """Do :meth:`start` with an encoded request and an encoded reply."""
        method: Any = self._channel.unary_unary(path)
        try:
            call = uninterrupted(partial(method.future, data, timeout=timeout_seconds))
        except ValueError as exc:  # raised by gRPC for a closed channel
            raise NotSent(f"{self._peer}: the connection is closed") from exc

        def await_reply() -> bytes:
            pause, longest = self.pauses or (None, 0.0)
            while True:
                try:
                    reply: bytes = uninterrupted(partial(call.result, pause))
                    return reply
                except grpc.FutureTimeoutError:
                    self.waited(call, timeout_seconds)
                    pause = min(2 * (pause or longest), longest)
                except grpc.RpcError as exc:
                    raise error_from(exc, self._peer) from exc
                except grpc.FutureCancelledError as exc:
                    raise AttemptFailed(f"{self._peer}: the connection was closed") from exc

        return await_reply

    def _reply(self, path: str, data: bytes, timeout_seconds: float | None) -> bytes:
        if self.pauses is not None:
            return self.start_bytes(path, data, timeout_seconds)()
        method: Any = self._channel.unary_unary(path)
        try:  # without a change of thread, which costs half a millisecond
            reply: bytes = method(data, timeout=timeout_seconds)
        except grpc.RpcError as exc:
            raise error_from(exc, self._peer) from exc
        except ValueError as exc:
            raise NotSent(f"{self._peer}: the connection is closed") from exc
        return reply

    def stream_bytes(self, path: str, data: bytes) -> Iterator[bytes]:
        """Do :meth:`stream` with an encoded request and encoded replies."""
        call: Any = self._channel.unary_stream(path)
        try:
            replies = call(data)
        except ValueError as exc:
            raise AttemptFailed(f"{self._peer}: the connection is closed") from exc
        try:
            yield from replies
        except grpc.RpcError as exc:
            raise error_from(exc, self._peer) from exc
        finally:
            replies.cancel()
