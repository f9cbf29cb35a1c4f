"""Who may ask a service over HTTP, for what, and how much.

By tokens under certificates, else whoever is on this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from starlette.requests import Request

from geartrain.ams.rpc.tokens import METADATA_KEY, RIGHTS, SCHEME
from geartrain.ams.values.config import ServeConfig
from geartrain.ams.values.text import quoted
from geartrain.serving.http.guard import Names
from geartrain.serving.http.refusals import RefusedRequest

OPEN_PATHS = ("/", "/livez", "/readyz", "/v2/health/live", "/v2/health/ready")
"""What anybody may ask: the page, which is the same everywhere, and probes, which have no token."""
_GRANT = "geartrain.grant"
"""In the scope of a request that may be here: the rights of its token; None: it needs none."""


class Callers:
    """Decides about each request before its body is read."""

    def __init__(
        self, listen: str, folder: str | None, origins: tuple[str, ...] = (), *, is_open: bool = False
    ) -> None:
        """Take the rules.

        Args:
            listen: where the service listens.
            folder: of certificates; None: without, and then names of this host alone are answered.
            origins: other web pages that may ask.
            is_open: whatever name a request is for (``insecure``): others give this host names of their own.
        """
        self._names = None if folder or is_open else Names(listen)
        self.origins = origins
        self.cluster = "local"
        """What counters are labelled with."""
        self._tokens: Any = None
        self._audit: Callable[..., None] = lambda *_, **__: None
        if folder is not None:
            from geartrain.ams.rpc.credentials import Credentials  # gRPC with it
            from geartrain.ams.rpc.server.access import audit, tokens_of

            self._tokens, self._audit = tokens_of(folder), audit
            self.cluster = Credentials.mine(listen).cluster

    @property
    def want_tokens(self) -> bool:
        """Whether a client must show one; else its certificate is enough."""
        return self._tokens is not None and bool(self._tokens.are_wanted)

    def require_known(self, request: Request) -> str:
        """Raises RefusedRequest unless the request is for this host and, where tokens are wanted, shows a good one.

        Returns by whom it is, for :class:`ClientRates`; :meth:`require` asks later what its token allows.
        """
        host = request.headers.get("host", "")
        if self._names is not None and not self._names.has(host):
            raise RefusedRequest(421, f"this service is not called {host!r}; ask it by its address or as localhost")
        origin = request.headers.get("origin")
        if not (origin is None or origin in self.origins or origin.partition("://")[2] == host):
            raise RefusedRequest(403, f"pages of {origin!r} may not ask here; serve.origins names those that may")
        client = "" if request.client is None else request.client.host
        request.scope[_GRANT] = None
        if self._tokens is None or not self._tokens.are_wanted or request.url.path in OPEN_PATHS:
            return client
        believed = self._believed(request.headers.get(METADATA_KEY, ""))
        if isinstance(believed, str):
            self._refuse(request, believed)
            raise RefusedRequest(
                401, f"{believed}; send a token that 'geartrain certs token' made: Authorization: Bearer gt1..."
            )
        token, request.scope[_GRANT] = believed
        return str(token.id)

    def client(self, authorization: str, address: str) -> str:
        """By whom a request is that gRPC let through, for :class:`ClientRates`: as :meth:`require_known`."""
        believed = self._believed(authorization) if self.want_tokens else ""
        return address if isinstance(believed, str) else str(believed[0].id)

    def require(self, request: Request, right: str, model: str) -> None:
        """Raises RefusedRequest unless the token of a known caller gives ``right`` to tables called as the model."""
        grant = request.scope[_GRANT]
        if grant is not None and not grant.rights(model) & RIGHTS[right]:
            why = f"its token gives no right to {right} {model!r}"
            self._refuse(request, why, model)
            raise RefusedRequest(
                403, f"{why}; 'geartrain certs token NAME FOLDER --allow \"{model}={right}\"' makes one"
            )

    def _believed(self, text: str) -> Any:
        return self._tokens.believed(text.removeprefix(SCHEME)) if text.startswith(SCHEME) else "it shows no token"

    def _refuse(self, request: Request, why: str, *models: str) -> None:
        client = "" if request.client is None else request.client.host
        self._audit({"caller": "http", "peer": client}, request.url.path, models, why)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much a client may ask: bytes, items, time, requests at once. See
    :class:`geartrain.ams.values.config.ServeConfig`."""

    max_body_bytes: int = 16 << 20
    max_items: int = 256
    max_requests: int = 512
    body_seconds: float = 10.0
    requests_per_second: float | None = None

    @classmethod
    def of(cls, config: ServeConfig) -> Self:
        """Those of a configuration."""
        return cls(**{name: getattr(config, name) for name in cls.__dataclass_fields__})

    async def body(self, request: Request) -> bytes:
        """Read the body of a request.

        Raises RefusedRequest: it is compressed, too long or too slow, or its client has left.
        """
        encoding, length = request.headers.get("content-encoding", "identity"), request.headers.get("content-length")
        if encoding.strip().lower() != "identity":
            raise RefusedRequest(415, f"content-encoding is {quoted(encoding)}; send the body without compression")
        if length is not None and (not length.isdecimal() or int(length) > self.max_body_bytes):
            raise self._too_long(length)
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.body_seconds):
                while True:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise RefusedRequest(400, "the client left before its request was there")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self.max_body_bytes:
                        raise self._too_long(f"more than {size}")
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise RefusedRequest(
                408,
                f"the body was not there after {self.body_seconds:g} s, {size:,} bytes of it were; send it faster, in "
                "smaller requests, or raise serve.body_seconds",
            ) from None

    def require_items(self, items: int) -> None:
        """Raises RefusedRequest for more than one request may have."""
        if items > self.max_items:
            raise RefusedRequest(
                413, f"the request has {items:,} items, the most is {self.max_items:,}; ask in several requests"
            )

    def _too_long(self, length: str) -> RefusedRequest:
        return RefusedRequest(
            413,
            f"the body has {quoted(length).strip(chr(39))} bytes, the most is {self.max_body_bytes:,}; send smaller "
            "images or fewer items, or raise serve.max_body_bytes",
        )
