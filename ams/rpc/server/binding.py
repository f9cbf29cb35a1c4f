"""Binding of handlers to gRPC: requests are decoded, passed to the handler of their type, and replies encoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import grpc

from geartrain.ams.rpc.server.peer_user import user_of_peer
from geartrain.ams.rpc.server.server import BytesMethod, BytesStream, ServedMethods
from geartrain.ams.rpc.services import Method, Service
from geartrain.ams.values.rpc import Rpc
from geartrain.ams.values.shard_messages import CallContext


@dataclass(frozen=True)
class Call:
    """Caller of a request, for a handler."""

    context: CallContext
    servicer: grpc.ServicerContext

    def user(self) -> int | None:
        """Return the user of the calling process on this machine; None: unknown."""
        return user_of_peer(self.servicer.peer())

    def require_waiting(self) -> None:
        """Abort a call whose caller has stopped waiting, before its effect."""
        if not self.servicer.is_active():
            self.servicer.abort(grpc.StatusCode.CANCELLED, "the caller stopped waiting")


Handlers = Mapping[type[Rpc[Any]], Callable[[Any, Any], Any]]
"""Handlers by type of request: (request, Call) -> reply, or an iterator of replies where the RPC streams them."""


def bind(
    service: Service, handlers: Handlers, of_bytes: Mapping[type[Rpc[Any]], BytesMethod] = MappingProxyType({})
) -> ServedMethods:
    """Return a service whose every RPC has a handler, by the type of its request; ``of_bytes`` has those of RPCs with
    rows. Raises TypeError if one has none.
    """
    methods: dict[str, BytesMethod] = {}
    streams: dict[str, BytesStream] = {}
    for kind, method in service.items():
        if kind not in (of_bytes if method.takes_bytes else handlers):
            raise TypeError(f"{method.path} has no handler")
        if method.takes_bytes:
            methods[method.name] = of_bytes[kind]
        elif method.is_stream:
            streams[method.name] = _streaming(method, handlers[kind])
        else:
            methods[method.name] = _answering(method, handlers[kind])
    return ServedMethods(service.name, methods, streams)


def _answering(method: Method, handler: Callable[[Any, Call], Any]) -> BytesMethod:
    def answer(data: bytes, servicer: grpc.ServicerContext) -> bytes:
        request, context = method.decode(data)
        return method.reply.encode(handler(request, Call(context, servicer)))

    return answer


def _streaming(method: Method, handler: Callable[[Any, Call], Any]) -> BytesStream:
    def answer(data: bytes, servicer: grpc.ServicerContext) -> Iterator[bytes]:
        request, context = method.decode(data)
        return map(method.reply.encode, handler(request, Call(context, servicer)))

    return answer
