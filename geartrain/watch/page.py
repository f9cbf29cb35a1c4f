"""The page that shows a running cluster: a small HTTP server, a client of the cluster like others.

Whoever has the link that it printed may look: the link is good once, for a cookie. One task looks at the cluster, each
second while a page is open, and tells all open pages by server-sent events.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ipaddress
import json
import logging
import re
import secrets
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from geartrain.ams.values.config import CLIENT, ClusterConfig, identity, is_loopback, join_address, split_address
from geartrain.ams.values.errors import ConfigError
from geartrain.watch.told import Told

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route
except ImportError as exc:
    raise ConfigError(f"the dashboard needs what is not installed: {exc}; pip install 'geartrain[dashboard]'") from exc

logger = logging.getLogger(__name__)

_MOST_BODY_BYTES = 1 << 16
_MOST_PAGES = 64


class Dashboard:
    """Serves the page of a cluster, on a thread of its own. A :class:`geartrain.launch.role.RunningRole`."""

    def __init__(self, config: ClusterConfig, listen: str) -> None:
        """Listen at ``"host:port"``. Raises ConfigError: nobody can listen there, or strangers could read along."""
        folder, _ = identity(listen)
        self._is_loopback = is_loopback(listen)
        if not self._is_loopback and folder is None:
            raise ConfigError(
                f"--listen {listen!r} can be reached from other machines, and the page would not be encrypted; set "
                "security.folder to a folder that 'geartrain certs init' fills, or listen on 127.0.0.1 and reach it "
                "by 'ssh -L'"
            )
        host, port = split_address(listen)
        try:
            family, *_, bind_to = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.create_server(bind_to[:2], family=family)
        except OSError as exc:
            why = (exc.strerror or str(exc)).lower()
            raise ConfigError(
                f"cannot show the page at {listen!r}: {why}; --listen takes an address of this machine and a port "
                "that is free (0 picks one)"
            ) from exc
        self.address = join_address(host, self._socket.getsockname()[1])
        """host:port that it listens at."""
        self.end_reason: str | None = None
        self._names = {"localhost", host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
        self._cookie = f"geartrain-{split_address(self.address)[1]}"  # cookies are of a host, not of a port
        self._session = secrets.token_urlsafe(32)
        self._key = secrets.token_urlsafe(32)
        self._html = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        self._told = Told(config)
        tls = {} if self._is_loopback else {"ssl_certfile": f"{folder}/{CLIENT}.pem"}
        routes = [
            Route("/", self._page),
            Route("/events", self._events),
            Route("/verify", self._verify, methods=["POST"]),
        ]
        settings = uvicorn.Config(
            self._guarded(Starlette(routes=routes, lifespan=self._lifespan)),
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=2 * _MOST_PAGES,
            timeout_graceful_shutdown=2,
            ws="none",
            **tls,  # type: ignore[arg-type]
        )
        self._server = uvicorn.Server(settings)
        self._thread = threading.Thread(target=self._serve, name="dashboard", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Opens the page, once."""
        return f"http{'' if self._is_loopback else 's'}://{self.address}/?key={self._key}"

    def wait(self) -> None:
        """Block until it has ended."""
        self._thread.join()

    def stop(self, grace_seconds: float) -> None:
        """End; open pages notice."""
        self._server.should_exit = True
        self._thread.join(grace_seconds)

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except BaseException as exc:  # uvicorn exits where it cannot begin
            self.end_reason = f"{type(exc).__name__}: {exc}"
            logger.exception("the page cannot be shown")

    @asynccontextmanager
    async def _lifespan(self, _: object) -> AsyncIterator[None]:
        looking = asyncio.create_task(self._told.go_on())
        yield
        looking.cancel()

    def _guarded(self, app: Any) -> Any:
        """Nobody is answered under another's name (DNS rebinding), or without the cookie but for the key."""

        async def guarded(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            request = Request(scope)
            await (self._refused(request) or app)(scope, receive, send)

        return guarded

    def _refused(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if not self._is_ours(host):
            return PlainTextResponse("this name is not of the dashboard; use its address\n", 421)
        if request.method == "POST" and request.headers.get("origin") != f"{request.url.scheme}://{host}":
            return PlainTextResponse("asked by another page\n", 403)
        by_key = request.url.path == "/" and _equal(request.query_params.get("key", ""), self._key)
        if by_key or _equal(request.cookies.get(self._cookie, ""), self._session):
            return None
        return PlainTextResponse("open the newest link that 'geartrain dashboard' printed: each is good once\n", 403)

    def _is_ours(self, host: str) -> bool:
        name = re.sub(r":\d+$", "", host).strip("[]").lower()
        try:
            ipaddress.ip_address(name)  # nobody can let a number mean another machine
        except ValueError:
            return name in self._names
        return True

    async def _page(self, request: Request) -> Response:
        response = HTMLResponse(self._html)
        script, style = (_hash(self._html, tag) for tag in ("script", "style"))
        response.headers.update(
            {
                "Content-Security-Policy": f"default-src 'none'; script-src {script}; style-src {style}; connect-src "
                "'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
                "Cache-Control": "no-store",
                "Referrer-Policy": "no-referrer",
                "X-Content-Type-Options": "nosniff",
            }
        )
        if _equal(request.query_params.get("key", ""), self._key):
            self._key = secrets.token_urlsafe(32)
            secure = not self._is_loopback
            response.set_cookie(self._cookie, self._session, httponly=True, samesite="strict", secure=secure)
            logger.info("the link was opened; for another browser: %s", self.url)
        return response

    async def _events(self, _: Request) -> Response:
        if self._told.pages >= _MOST_PAGES:
            return PlainTextResponse(f"{_MOST_PAGES} pages are open; close some\n", 503)
        return StreamingResponse(self._stream(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def _stream(self) -> AsyncIterator[str]:
        told, seen, at, is_new = self._told, 0, 0.0, True
        with told.open_page():
            while not self._server.should_exit:
                if is_new:
                    message, seen, at = told.message(seen, at)
                    yield f"data: {json.dumps(message)}\n\n"
                is_new = await told.is_newer(at)

    async def _verify(self, request: Request) -> Response:
        try:
            path = json.loads(await _body(request))["snapshot"]
        except (ValueError, TypeError, KeyError):
            return PlainTextResponse('say {"snapshot": PATH}\n', 400)
        why = self._told.begin_to_verify(path)
        return PlainTextResponse(f"{why}\n", 409) if why else PlainTextResponse("begun\n", 202)


def _equal(given: str, secret: str) -> bool:
    return secrets.compare_digest(given.encode(), secret.encode())


def _hash(html: str, tag: str) -> str:
    text = html.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


async def _body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MOST_BODY_BYTES:
            raise ValueError("too long")
    return body
