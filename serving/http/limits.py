"""How much a client may ask of a service over HTTP: bytes, items, time, requests at once."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Self

from starlette.requests import Request

from geartrain.ams.values.config import ServeConfig
from geartrain.ams.values.text import quoted
from geartrain.serving.http.refusals import RefusedRequest


@dataclass(frozen=True, kw_only=True)
class Limits:
    """See :class:`geartrain.ams.values.config.ServeConfig`."""

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
