"""Base of all gRPC services: the server itself, health, reflection, and error replies."""

from __future__ import annotations

import errno
import functools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from geartrain.ams.kernels._core import Waiter
from geartrain.ams.observe.call_counts import ENDED_EARLY, WELL, CallCounts
from geartrain.ams.rpc.channel import WAITS_KEY, channel_options
from geartrain.ams.rpc.credentials import Credentials
from geartrain.ams.rpc.server.access import Access, Asks
from geartrain.ams.rpc.server.memory import watch_memory
from geartrain.ams.rpc.server.silent_connections import SilentConnections
from geartrain.ams.rpc.server.threads import CallThreads, message_is_here
from geartrain.ams.rpc.server.waiting import BeginMethod, WaitingCalls
from geartrain.ams.rpc.status import abort
from geartrain.ams.values.config import format_address, split_address
from geartrain.ams.values.errors import ConfigError, GeartrainError, InternalError, ShardUnavailable

R = TypeVar("R")

MAX_CONCURRENT_CALLS = 128
"""Threads for calls. Calls that wait for other callers hold none (see geartrain.ams.rpc.server.waiting)."""

_HEALTH_THREADS = 2

BytesMethod = Callable[[bytes, grpc.ServicerContext], bytes]
BytesStream = Callable[[bytes, grpc.ServicerContext], Iterator[bytes]]


class ServedMethods(NamedTuple):
    """A service and its methods by name: encoded request → encoded reply (streams: → replies)."""

    service: str
    methods: Mapping[str, BytesMethod]
    streams: Mapping[str, BytesStream] = MappingProxyType({})
    asks: Mapping[str, Asks] = MappingProxyType({})
    """Rights that the requests of each method need, for a service that is in no access list. Every role of the cluster
    may call it, programs within their tokens."""


class GrpcServer:
    """A bound port that serves one service, with health, and reflection on request."""

    def __init__(
        self,
        listen: str,
        max_message_bytes: int,
        *,
        reflection: bool = False,
        credentials: Credentials | None = None,
        is_shared: bool = False,
    ) -> None:
        """Bind ``"host:port"``, under ``credentials``, by default those of this process there.

        ``is_shared``: other processes of this user may bind it, too; each connection goes to one of them.
        """
        self.calls = CallThreads(MAX_CONCURRENT_CALLS, "grpc", max_message_bytes)
        """Threads of the methods without a lane of their own."""
        mine = credentials or Credentials.mine(listen)
        self.counts = CallCounts()
        """Counters of the calls of its services."""
        strangers = SilentConnections()
        access = Access(mine, mine.folder, strangers, self.counts) if mine.names and mine.folder else None
        self._access = access
        self.tokens = None if access is None else access.tokens
        """Tokens that it accepts; None: it has no certificates, and requires none."""
        options = [*channel_options(max_message_bytes), ("grpc.so_reuseport", int(is_shared))]
        watch: list[grpc.ServerInterceptor] = [] if access is None else [access]
        self._server = grpc.server(self.calls, interceptors=watch, options=options)
        self._waiting = WaitingCalls(self.calls, self.counts)
        host, port = split_address(listen)
        try:
            strangers.port = bound = mine.open_port(self._server, listen, strangers.begun)
        except RuntimeError as exc:
            raise ConfigError(_refusal(listen, host, port)) from exc
        if bound == 0:
            raise ConfigError(_refusal(listen, host, port))
        self.address = format_address(host, bound)
        self._health = health.HealthServicer()
        self._health_pool = CallThreads(_HEALTH_THREADS, "grpc-health")
        # A server all of whose threads wait must still answer health checks.
        self._health.Check = _on_lane(self._health.Check, self._health_pool)  # type: ignore[method-assign]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._services: list[str] = []
        self._has_reflection = reflection

    def add(
        self,
        bound: ServedMethods,
        lanes: Mapping[str, ThreadPoolExecutor] = MappingProxyType({}),
        waiting: Mapping[str, BeginMethod] = MappingProxyType({}),
    ) -> None:
        """Add a service, not yet healthy. Methods named in ``lanes`` run on threads of their own, independent of
        others. ``waiting`` handles the calls of its methods that are marked as waiting for other callers.
        """
        service, methods, streams, asks = bound
        if self._access is not None:
            self._access.know({f"/{service}/{name}": reads for name, reads in asks.items()})
        handlers: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(_on_lane(self._typed(name, method), lanes.get(name)))
            for name, method in methods.items()
        }
        handlers |= {
            name: grpc.unary_stream_rpc_method_handler(self._typed_stream(name, stream))
            for name, stream in streams.items()
        }
        # gRPC uses the first handler that knows a call.
        waiting_handlers = _WaitingCallsHandler(
            service, {name: self._waiting.handler(name, begin) for name, begin in waiting.items()}
        )
        whole = grpc.method_handlers_generic_handler(service, handlers)
        self._server.add_generic_rpc_handlers((waiting_handlers, whole) if waiting else (whole,))
        self._services.append(service)
        self._health.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)

    def _typed(self, name: str, method: BytesMethod) -> BytesMethod:
        def answer(data: bytes, servicer_context: grpc.ServicerContext) -> bytes:
            with self._answering(name, data, servicer_context) as sent:
                reply = method(data, servicer_context)
                sent.append(len(reply))
                return reply

        return answer

    def _typed_stream(self, name: str, stream: BytesStream) -> BytesStream:
        def answer(data: bytes, servicer_context: grpc.ServicerContext) -> Iterator[bytes]:
            with self._answering(name, data, servicer_context) as sent:
                for reply in stream(data, servicer_context):
                    sent.append(len(reply))
                    yield reply

        return answer

    @contextmanager
    def _answering(self, name: str, data: bytes, servicer_context: grpc.ServicerContext) -> Iterator[list[int]]:
        """Count a call with the bytes that its body appends, and send the caller its error."""
        message_is_here()
        began = time.perf_counter()
        code = ENDED_EARLY
        sent: list[int] = []
        try:
            yield sent
            code = WELL
        except GeartrainError as error:
            code = type(error).__name__
            abort(servicer_context, error)
        except MemoryError as error:
            code = InternalError.__name__
            abort(servicer_context, InternalError(f"out of memory: {error}"))
        finally:
            self.counts.add(name, code, time.perf_counter() - began, len(data), sum(sent))

    def start(self) -> None:
        """Accept calls. Health is NOT_SERVING until :meth:`ready`."""
        if self._has_reflection:
            names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        watch_memory()
        self._server.start()

    def ready(self) -> None:
        """Set health to SERVING."""
        for service in ("", *self._services):
            self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    def set_readiness(self, readiness: Mapping[str, bool]) -> None:
        """Set the health of more services, by name: the states that the role is ready for."""
        for service, is_serving in readiness.items():
            status = health_pb2.HealthCheckResponse
            self._health.set(service, status.SERVING if is_serving else status.NOT_SERVING)

    def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, give those under way ``grace_seconds``, then stop. Blocks until it is done."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace_seconds).wait()
        self._waiting.close()
        for threads in (self.calls, self._health_pool):
            threads.close()
        self._health_pool.shutdown(wait=False)


class _WaitingCallsHandler(grpc.GenericRpcHandler):
    """Handler of calls whose metadata mark them as waiting for other callers."""

    def __init__(self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]) -> None:
        self._handlers = {f"/{service}/{name}": handler for name, handler in handlers.items()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return the handler of the call; None: it is not one of these."""
        handler = self._handlers.get(handler_call_details.method)
        if handler is None or WAITS_KEY not in dict(handler_call_details.invocation_metadata or ()):
            return None
        return handler


def _refusal(listen: str, host: str, port: int) -> str:
    """Return why the address cannot be bound, and the remedy. gRPC gives no reason; a socket does."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            probe.listen()
    except OSError as exc:
        if exc.errno == errno.EADDRINUSE:
            return (
                f"cannot listen on {listen!r}: another process uses port {port}; end that process, or choose another "
                "port (0 picks a free one)"
            )
        reason = (exc.strerror or str(exc)).lower()
        return f"cannot listen on {listen!r}: {reason}; choose an address of this machine and a port you may use"
    return f"cannot listen on {listen!r}: the port was in use a moment ago; try again"


def await_reply(future: Future[Any], servicer_context: grpc.ServicerContext) -> Any:
    """Wait for ``future``, but no longer than the caller does: work that has not begun is then cancelled."""
    if future.done():
        return future.result()
    settled = threading.Event()
    future.add_done_callback(lambda _: settled.set())
    if not servicer_context.add_callback(settled.set):
        settled.set()
    settled.wait()
    if not future.done():
        future.cancel()
        servicer_context.abort(grpc.StatusCode.CANCELLED, "the caller stopped waiting")
    return future.result()


def done_here(work: Callable[[Waiter], R], servicer_context: grpc.ServicerContext) -> R:
    """Run ``work`` on this thread and return its result. If the caller leaves before it has begun, it never does."""
    waiter = Waiter()
    if not servicer_context.add_callback(waiter.leave):
        waiter.leave()
    try:
        return work(waiter)
    except ShardUnavailable:
        if waiter.has_left:
            servicer_context.abort(grpc.StatusCode.CANCELLED, "the caller stopped waiting")
        raise


def _on_lane(method: Callable[..., Any], lane: ThreadPoolExecutor | None) -> Callable[..., Any]:
    """Return ``method`` for the threads of ``lane``; None: those of its server."""

    @functools.wraps(method)
    def answer(request: Any, servicer_context: grpc.ServicerContext) -> Any:
        return method(request, servicer_context)

    answer.experimental_thread_pool = lane  # type: ignore[attr-defined]
    return answer
