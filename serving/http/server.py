"""HTTP server on a thread of this process: uvicorn, with limits on what a connection may hold."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any

import uvicorn

from geartrain.ams.values.config import format_address
from geartrain.serving.http.ports import BACKLOG

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError:
    HttpToolsProtocol = None  # type: ignore[assignment, misc]

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 16_384
"""Longest headers of a request, including its address."""
MAX_CONNECTIONS = 4096
_KEEP_SECONDS = 30
"""Idle time after which a connection is closed."""
_TAKE_SECONDS = 60.0
"""Time for a client to read its answer; without it, a client that reads nothing would hold its request for ever."""


class HttpServer:
    """Serves an ASGI app on a thread, from construction until it is stopped."""

    def __init__(
        self,
        app: Any,
        listener: socket.socket,
        host: str,
        *,
        name: str,
        tls: ssl.SSLContext | None = None,
        each_second: Callable[[], None] | None = None,
        headers_seconds: float = 10.0,
        grace_seconds: float = 3.0,
        connections: int = MAX_CONNECTIONS,
        take_seconds: float = _TAKE_SECONDS,
    ) -> None:
        """Serve ``app`` on a socket; it listens once this returns.

        Args:
            app: an ASGI app with lifespan.
            listener: closed when the server ends.
            host: host part of :attr:`address`.
            name: name of the thread.
            tls: None: without TLS.
            each_second: called on the event loop.
            headers_seconds: longest time for the headers of a request.
            grace_seconds: time for requests in progress when the server stops.
            connections: most connections; further ones are closed.
            take_seconds: longest time for a client to read its answer.
        """
        self.address = format_address(host, listener.getsockname()[1])
        """host:port of the server."""
        self.stop_reason: str | None = None

        async def tick() -> None:
            if each_second is not None:
                each_second()

        settings = uvicorn.Config(
            app,
            http="auto" if HttpToolsProtocol is None else _bounded(headers_seconds, connections, take_seconds),
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=max(1, round(grace_seconds)),
            timeout_keep_alive=_KEEP_SECONDS,
            timeout_notify=1,
            callback_notify=tick,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            ws="none",
            **({} if tls is None else {"ssl_context_factory": lambda *_: tls}),  # type: ignore[arg-type]
        )
        listener.listen(BACKLOG)
        self._listener = listener
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    @property
    def is_ending(self) -> bool:
        """Whether the server was told to stop."""
        return self._server.should_exit

    def wait(self) -> None:
        """Block until the server has ended."""
        self._thread.join()

    def stop(self, grace_seconds: float) -> None:
        """Answer the requests in progress, accept no others, end."""
        self._server.should_exit = True
        self._thread.join(grace_seconds)

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        except BaseException as exc:  # uvicorn exits if it cannot start
            self.stop_reason = f"{type(exc).__name__}: {exc}"
            logger.exception("HTTP cannot be served")


def _bounded(headers_seconds: float, connections: int, take_seconds: float) -> type[asyncio.Protocol]:
    """Return uvicorn's connection class with limits that it lacks: size of headers, time to receive them, time to read
    an answer."""

    class BoundedConnection(HttpToolsProtocol):
        _in_headers = True
        _has_ended = False
        _header_bytes = 0
        _deadline: asyncio.TimerHandle | None = None
        _taken_by: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > connections:
                transport.abort()
            self._await_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._headers_are_there()
            super().connection_lost(exc)
            self._is_taken()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._is_taken()
            self._taken_by = self.loop.call_later(take_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._is_taken()

        def data_received(self, data: bytes) -> None:
            if self._in_headers and self._deadline is None:
                self._await_headers()
            self._has_ended = False
            super().data_received(data)
            if self._in_headers and not self._has_ended:
                self._header_bytes += len(data)
                if self._header_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                    self.send_400_response("")

        def on_headers_complete(self) -> None:
            self._headers_are_there()
            sizes = sum(len(name) + len(value) for name, value in self.headers)
            self._header_bytes = len(self.url) + sizes
            if self._header_bytes > MAX_HEADER_BYTES:
                raise ValueError("headers")  # the parser stops, and send_400_response is called
            super().on_headers_complete()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._in_headers, self._has_ended, self._header_bytes = True, True, 0

        def send_400_response(self, msg: str) -> None:  # noqa: ARG002
            if self._header_bytes > MAX_HEADER_BYTES:
                status, code = 431, "too_large"
                why = f"the headers are more than {MAX_HEADER_BYTES:,} bytes; send fewer, and the rest in the body"
            else:
                status, code = 400, "bad_request"
                why = "this is no request of HTTP/1.1; was https meant, or another port?"
            body = json.dumps({"error": {"code": code, "message": why}}).encode()
            head = f"HTTP/1.1 {status} {code}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
            self.transport.close()

        def _is_taken(self) -> None:
            if self._taken_by is not None:
                self._taken_by.cancel()
                self._taken_by = None

        def _await_headers(self) -> None:
            self._deadline = self.loop.call_later(headers_seconds, self._too_slow)

        def _headers_are_there(self) -> None:
            self._in_headers = False
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _too_slow(self) -> None:
            self._deadline = None
            if self._in_headers and not self.transport.is_closing():
                self.transport.close()

    return BoundedConnection
