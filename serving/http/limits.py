"""How much a client may ask of a service: bytes, items, time, requests at once and per second."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from geartrain.ams.values.config import ServeConfig
from geartrain.ams.values.text import quoted
from geartrain.serving.http.refusals import RefusedRequest

_MOST_CLIENTS = 10_000
"""That are remembered; who was not seen for longest is forgotten."""


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

    async def body(self, receive: Callable[[], Any], length: str | None) -> bytes:
        """Read the body of a request. Raises RefusedRequest: it is too long or too slow, or its client has left."""
        if length is not None and (not length.isdecimal() or int(length) > self.max_body_bytes):
            raise self._too_long(length)
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.body_seconds):
                while True:
                    message = await receive()
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


class ClientRates:
    """Requests of each client: for longer than a second no more than so many per second. Used by one event loop."""

    def __init__(self, per_second: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second, self._clock = per_second, clock
        self._clients: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Client -> (requests that it may make, as of when)."""

    def require(self, client: str) -> None:
        """Count a request. Raises RefusedRequest, which says when the next may come."""
        if self._per_second is None:
            return
        now, most = self._clock(), max(1.0, self._per_second)
        may, at = self._clients.pop(client, (most, now))
        may = min(most, may + (now - at) * self._per_second)
        self._clients[client] = (max(0.0, may - 1), now) if may >= 1 else (may, now)
        if len(self._clients) > _MOST_CLIENTS:
            self._clients.popitem(last=False)
        if may < 1:
            wait = (1 - may) / self._per_second
            raise RefusedRequest(
                429,
                f"more than {self._per_second:g} requests per second; ask again in {wait:.2g} s, several items in one "
                "request count once",
                retry_after_seconds=wait,
            )
