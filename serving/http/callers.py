"""Access control and limits of HTTP requests.

With certificates, tokens decide; otherwise everybody on this machine has access.
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
from geartrain.serving.http.host_names import HostNames
from geartrain.serving.http.refusals import RefusedRequest

OPEN_PATHS = ("/", "/livez", "/readyz", "/v2/health/live", "/v2/health/ready")
"""Paths open to anybody: the page, which is the same everywhere, and probes, which have no token."""
_GRANT = "geartrain.grant"
"""Key in the scope of an admitted request: its token's rights; None: it needs none."""


class Callers:
    """Decides on each request before its body is read."""

    def __init__(
        self, listen: str, folder: str | None, origins: tuple[str, ...] = (), *, is_open: bool = False
    ) -> None:
        """Store the rules.

        Args:
            listen: address of the service.
            folder: folder of certificates; None: no certificates, and only names of this host are accepted.
            origins: other web origins that may send requests.
            is_open: accept any host name (``insecure``): others may give this host names of their own.
        """
        self._names = None if folder or is_open else HostNames(listen)
        self.origins = origins
        self.cluster = "local"
        """Cluster label of the counters."""
        self._tokens: Any = None
        self._audit: Callable[..., None] = lambda *_, **__: None
        if folder is not None:
            from geartrain.ams.rpc.credentials import Credentials  # imports gRPC
            from geartrain.ams.rpc.server.access import audit, tokens_of

            self._tokens, self._audit = tokens_of(folder), audit
            self.cluster = Credentials.mine(listen).cluster

    @property
    def want_tokens(self) -> bool:
        """Whether a client must show a token; otherwise its certificate is enough."""
        return self._tokens is not None and bool(self._tokens.are_wanted)

    def require_known(self, request: Request) -> str:
        """Raise RefusedRequest unless the request is for this host and, where tokens are required, shows a valid one.

        Returns the client's key for :class:`ClientRates`; :meth:`require` checks later what its token allows.
        """
        host = request.headers.get("host", "")
        if self._names is not None and not self._names.has(host):
            raise RefusedRequest(421, f"this service is not called {host!r}; ask it by its address or as localhost")
        origin = request.headers.get("origin")
        if not (origin is None or origin in self.origins or origin.partition("://")[2] == host):
            raise RefusedRequest(403, f"pages of {origin!r} may not send requests; serve.origins lists those that may")
        client = "" if request.client is None else request.client.host
        request.scope[_GRANT] = None
        if self._tokens is None or not self._tokens.are_wanted or request.url.path in OPEN_PATHS:
            return client
        trusted = self._trusted(request.headers.get(METADATA_KEY, ""))
        if isinstance(trusted, str):
            self._refuse(request, trusted)
            raise RefusedRequest(
                401, f"{trusted}; send a token that 'geartrain certs token' made: Authorization: Bearer gt1..."
            )
        token, request.scope[_GRANT] = trusted
        return str(token.id)

    def client(self, authorization: str, address: str) -> str:
        """Return the key for :class:`ClientRates` of a request that gRPC admitted, as :meth:`require_known` does."""
        trusted = self._trusted(authorization) if self.want_tokens else ""
        return address if isinstance(trusted, str) else str(trusted[0].id)

    def require(self, request: Request, right: str, model: str) -> None:
        """Raise RefusedRequest unless the token of a known client gives ``right`` on tables of the model's name."""
        grant = request.scope[_GRANT]
        if grant is not None and not grant.rights(model) & RIGHTS[right]:
            why = f"its token gives no right to {right} {model!r}"
            self._refuse(request, why, model)
            raise RefusedRequest(
                403, f"{why}; 'geartrain certs token NAME FOLDER --allow \"{model}={right}\"' makes one"
            )

    def _trusted(self, text: str) -> Any:
        return self._tokens.trusted(text.removeprefix(SCHEME)) if text.startswith(SCHEME) else "it shows no token"

    def _refuse(self, request: Request, why: str, *models: str) -> None:
        client = "" if request.client is None else request.client.host
        self._audit({"caller": "http", "peer": client}, request.url.path, models, why)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a request: bytes, items, time, requests at once. :class:`geartrain.ams.values.config.ServeConfig`
    describes them."""

    max_body_bytes: int = 16 << 20
    max_items: int = 256
    max_requests: int = 512
    body_seconds: float = 10.0
    requests_per_second: float | None = None

    @classmethod
    def of(cls, config: ServeConfig) -> Self:
        """Return the limits of a configuration."""
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
        """Raise RefusedRequest if a request has too many items."""
        if items > self.max_items:
            raise RefusedRequest(
                413, f"the request has {items:,} items, the most is {self.max_items:,}; send several requests"
            )

    def _too_long(self, length: str) -> RefusedRequest:
        return RefusedRequest(
            413,
            f"the body has {quoted(length).strip(chr(39))} bytes, the most is {self.max_body_bytes:,}; send smaller "
            "images or fewer items, or raise serve.max_body_bytes",
        )
