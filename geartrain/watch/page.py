"""Dashboard of a running cluster: a small HTTP server, which is an ordinary client of the cluster.

The link it prints gives access: it works once and sets a cookie. The next link is in a file that only its user can
read. One task polls the cluster, each second while a page is open, and sends the result to all open pages as
server-sent events.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import platformdirs

from geartrain.ams.rpc.credentials import Credentials
from geartrain.ams.values.config import ClusterConfig, identity, is_loopback, split_address
from geartrain.ams.values.errors import ConfigError
from geartrain.launch.certificates import write_file
from geartrain.serving.http.host_names import HostNames
from geartrain.watch.dashboard_state import DashboardState

try:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route

    from geartrain.serving.http.page import page_response
    from geartrain.serving.http.ports import listening_socket
    from geartrain.serving.http.server import HttpServer
except ImportError as exc:
    raise ConfigError(f"the dashboard needs what is not installed: {exc}; pip install 'geartrain[dashboard]'") from exc

logger = logging.getLogger(__name__)

_MAX_BODY_BYTES = 1 << 16
_MAX_PAGES = 64
_ANSWER_SECONDS = 2.0
_ANOTHER = """<title>Geartrain: another link is needed</title><main><section>
<h1>{why}</h1>
<p>Each link opens the page in one browser, once. For another, type on the machine of the dashboard, as its user:</p>
<p><code>geartrain dashboard --link --listen {address}</code></p>
</section></main>"""


class Dashboard:
    """Serves the page of a cluster on a thread of its own. A :class:`geartrain.launch.role.RunningRole`."""

    def __init__(self, config: ClusterConfig, listen: str) -> None:
        """Listen at ``"host:port"``. Raises ConfigError: it cannot be bound, or strangers could read along."""
        folder, _ = identity(listen)
        self._is_loopback = is_loopback(listen)
        if not self._is_loopback and folder is None:
            raise ConfigError(
                f"--listen {listen!r} can be reached from other machines, and the page would not be encrypted; set "
                "security.folder to a folder that 'geartrain certs init' fills, or listen on 127.0.0.1 and reach it "
                "by 'ssh -L'"
            )
        self._names = HostNames(listen)
        listener = listening_socket(listen, "show the page")
        host, _ = split_address(listen)
        self._cookie = f"geartrain-{listener.getsockname()[1]}"  # a cookie belongs to a host, not to a port
        self._session = secrets.token_urlsafe(32)
        self._used: set[str] = set()
        """Keys of used links."""
        self._html = _html()
        self._state = DashboardState(config)
        routes = [
            Route("/", self._page),
            Route("/events", self._events),
            Route("/verify", self._verify, methods=["POST"]),
        ]
        app = self._guarded(Starlette(routes=routes, lifespan=self._lifespan))
        tls, renew = (None, None) if self._is_loopback else Credentials.mine(listen).https(shows_certificate=False)
        self._server = HttpServer(
            app,
            listener,
            host,
            name="dashboard",
            tls=tls,
            each_second=renew,
            grace_seconds=2,
            connections=2 * _MAX_PAGES,
        )
        self.address = self._server.address
        """host:port of the page."""
        self.wait = self._server.wait
        self._create_key()

    def stop(self, grace_seconds: float) -> None:
        self._server.stop(grace_seconds)
        with contextlib.suppress(OSError):
            _link_file(self.address).unlink()

    @property
    def stop_reason(self) -> str | None:
        """Reason why it ended by itself; None if it did not."""
        return self._server.stop_reason

    @property
    def url(self) -> str:
        """Link that opens the page, once."""
        return f"http{'' if self._is_loopback else 's'}://{self.address}/?key={self._key}"

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: object) -> AsyncIterator[None]:
        looking = asyncio.create_task(self._state.run())
        yield
        looking.cancel()

    def _guarded(self, app: Any) -> Any:
        """Refuse requests under another host name (DNS rebinding), and requests with neither the cookie nor the key."""

        async def guarded(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            request = Request(scope)
            await (self._refused(request) or app)(scope, receive, send)

        return guarded

    def _refused(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if not self._names.has(host):
            return PlainTextResponse("this name is not of the dashboard; use its address\n", 421)
        if request.method == "POST" and request.headers.get("origin") != f"{request.url.scheme}://{host}":
            return PlainTextResponse("asked by another page\n", 403)
        by_key = request.url.path == "/" and _equal(request.query_params.get("key", ""), self._key)
        if by_key or _equal(request.cookies.get(self._cookie, ""), self._session):
            return None
        why = "This page opens by a link"
        if (key := request.query_params.get("key")) is not None:
            is_used = key in self._used
            why = "This link was used" if is_used else "This link is not of this dashboard, or was copied in part"
        response = page_response(_ANOTHER.format(why=why, address=self.address))
        response.status_code = 403
        return response

    async def _page(self, request: Request) -> Response:
        response = page_response(self._html)
        if _equal(request.query_params.get("key", ""), self._key):
            self._used.add(self._key)
            self._create_key()
            secure = not self._is_loopback
            response.set_cookie(self._cookie, self._session, httponly=True, samesite="strict", secure=secure)
            logger.info("the link was opened; for another browser: %s", self.url)
        return response

    def _create_key(self) -> None:
        self._key = secrets.token_urlsafe(32)
        try:
            path = _link_file(self.address)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, self.url.encode())
        except OSError as exc:
            logger.warning("'geartrain dashboard --link' will not know the next link: %s", exc)

    async def _events(self, _: Request) -> Response:
        if self._state.pages >= _MAX_PAGES:
            return PlainTextResponse(f"{_MAX_PAGES} pages are open; close some\n", 503)
        return StreamingResponse(self._stream(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def _stream(self) -> AsyncIterator[str]:
        told, seen, at, is_new = self._state, 0, 0.0, True
        with told.open_page():
            while not self._server.is_ending:
                if is_new:
                    message, seen, at = told.message(seen, at)
                    yield f"data: {json.dumps(message)}\n\n"
                is_new = await told.is_newer(at)

    async def _verify(self, request: Request) -> Response:
        try:
            path = json.loads(await _body(request))["snapshot"]
        except (ValueError, TypeError, KeyError):
            return PlainTextResponse('say {"snapshot": PATH}\n', 400)
        why = self._state.start_verification(path)
        return PlainTextResponse(f"{why}\n", 409) if why else PlainTextResponse("begun\n", 202)


def link_to(listen: str) -> str:
    """Return a link for another browser to the dashboard of this user at ``"host:port"`` of this machine.

    Raises ConfigError if there is none.
    """
    path = _link_file(listen)
    try:
        link = path.read_text(encoding="utf-8")
        socket.create_connection(split_address(listen), _ANSWER_SECONDS).close()  # a killed one leaves its file behind
    except OSError as exc:
        raise ConfigError(
            f"no dashboard of yours listens at {listen}; 'geartrain dashboard --listen {listen}' is one"
        ) from exc
    return link


def _link_file(listen: str) -> Path:
    """Return the file of the next link, in a folder that hosts may share."""
    return platformdirs.user_state_path("geartrain") / f"dashboard-{socket.gethostname()}-{listen}"


def _html() -> str:
    """Return the page's HTML, after the script of its curves and the library that draws them."""
    names = ("uPlot.min.css", "uPlot.iife.min.js", "curves.js", "page.html")
    style, library, curves, page = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in names)
    return f"<style>{style}</style><script>{library}</script><script>{curves}</script>{page}"


def _equal(given: str, secret: str) -> bool:
    return secrets.compare_digest(given.encode(), secret.encode())


async def _body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_BODY_BYTES:
            raise ValueError("too long")
    return body
