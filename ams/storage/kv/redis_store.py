"""Small state in a Redis server, for what one process after another takes over.

All keys of a name are fields of one Redis hash, so a change is one script, which the server runs alone: it first looks
whether the writer still holds the name. Whoever opens the name takes it over; a predecessor that still runs is shut out
from its next change on. Each change is numbered by its holder: one that was sent again, and is still on its way on a
connection that was given up, comes too late to undo what followed. What a loss of power leaves is the server's business
(``appendonly yes``, ``appendfsync``).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from geartrain.ams.storage.features.redis_features import refusal, without_password
from geartrain.ams.storage.kv.store import seal, unseal
from geartrain.ams.values.errors import ConfigError, InvalidArgument, StaleClient, StateFailed, StoreUnavailable

_HOLDER = b"\0holder"
"""The field that says who holds the name and which change was its last, ``TAKEOVER-NONCE:CHANGE``; no other begins
with a zero. The nonce, because a server that fell back counts to the same takeover twice."""
_TAKE_OVER = """
local held = redis.call('HGET', KEYS[1], ARGV[1]) or ''
local takeover = tonumber(string.match(held, '^%d+') or '0') + 1
local token = string.format('%d-%s', takeover, ARGV[2])
redis.call('HSET', KEYS[1], ARGV[1], token .. ':0')
return token
"""
_WRITE = """
local held = redis.call('HGET', KEYS[1], ARGV[1])
if held == ARGV[3] then return 1 end
if held ~= ARGV[2] then return 0 end
local removed = tonumber(ARGV[4])
for i = 5, 4 + removed do redis.call('HDEL', KEYS[1], ARGV[i]) end
for i = 5 + removed, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
"""
_PAUSE_SECONDS = 0.2


class RedisStore:
    """A :class:`KeyValueStore` in a Redis server, held by whoever opened its name last.

    A server that does not answer is waited for: a change may repeat without harm. A change is one round trip of its
    bytes; ``read_all`` one of everything.
    """

    def __init__(
        self, url: str, name: str, *, timeout_seconds: float = 5.0, recovery_timeout_seconds: float = 20.0
    ) -> None:
        """Take the name over.

        Args:
            url: ``redis://HOST:PORT/DB`` (``rediss://``, ``unix://SOCKET?db=0``).
            name: of the state; the key is ``geartrain:state:{NAME}``.
            timeout_seconds: longest wait to connect, and for each reply.
            recovery_timeout_seconds: longest wait for a server that does not answer (0: one attempt).

        Raises:
            ConfigError: the URL cannot be right, or the server may evict what has no expiry.
            InvalidArgument: no name.
            StoreUnavailable: it does not answer.
        """
        if not name:
            raise InvalidArgument("name is ''; it must say whose state this is")
        self._shown = f"{name!r} in the Redis server {without_password(url)}"
        self._key = f"geartrain:state:{{{name}}}"
        self._recovery_timeout_seconds = recovery_timeout_seconds
        try:
            self._client: Any = redis.Redis.from_url(
                url,
                socket_timeout=timeout_seconds,
                socket_connect_timeout=timeout_seconds,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as exc:
            raise ConfigError(f"{without_password(url)!r} is no Redis URL: {exc}") from exc
        memory = self._patiently(lambda: self._client.info("memory"))
        policy = memory.get("maxmemory_policy", "noeviction")
        if memory.get("maxmemory") and policy.startswith("allkeys"):
            raise ConfigError(
                f"the Redis server {without_password(url)} evicts any key (maxmemory-policy {policy}), so it would "
                "lose state; start it with --maxmemory-policy volatile-lru"
            )
        nonce = secrets.token_hex(8)
        self._token: bytes = self._patiently(lambda: self._client.eval(_TAKE_OVER, 1, self._key, _HOLDER, nonce))
        self._changes = 0
        self._failure: str | None = None
        """Why no further change is taken."""

    def read_all(self) -> dict[str, bytes]:
        """See :class:`KeyValueStore`. Also raises StoreUnavailable, StaleClient."""
        fields = self._patiently(lambda: self._client.hgetall(self._key))
        if not fields.pop(_HOLDER, b"").startswith(self._token + b":"):
            raise self._superseded()
        return {name.decode(): unseal(name.decode(), sealed, self._shown) for name, sealed in fields.items()}

    def write(self, changes: Mapping[str, bytes | None]) -> None:
        """See :class:`KeyValueStore`; return when the server has made the change. Also raises StaleClient."""
        if self._failure is not None:
            raise StateFailed(self._failure)
        removed = [key for key, value in changes.items() if value is None]
        before, after = (b"%b:%d" % (self._token, number) for number in (self._changes, self._changes + 1))
        arguments: list[str | bytes | int] = [_HOLDER, before, after, len(removed), *removed]
        for key, value in changes.items():
            if value is not None:
                arguments += [key, seal(key, value)]
        # Unless the server answers: a change that comes later, at any time, must not meet another of its number.
        self._failure = f"{self._shown}: whether an earlier change was made is not known; open it again"
        try:
            held = self._patiently(lambda: self._client.eval(_WRITE, 1, self._key, *arguments))
        except StoreUnavailable as exc:
            raise StateFailed(f"{exc}; whether the last change was made is not known") from exc
        self._failure = None
        if not held:
            raise self._superseded()
        self._changes += 1

    def close(self) -> None:
        """See :class:`KeyValueStore`. The name stays held by nobody else until somebody opens it."""
        self._failure = f"{self._shown} was closed; open it again"
        self._client.close()

    def _patiently(self, call: Any) -> Any:
        deadline = time.monotonic() + self._recovery_timeout_seconds
        while True:
            try:
                return call()
            except (redis.ConnectionError, redis.TimeoutError) as exc:
                if time.monotonic() >= deadline or isinstance(exc, redis.AuthenticationError):
                    raise StoreUnavailable(
                        f"{self._shown} cannot be reached: {exc}; see that the server runs and can be reached from "
                        "here (redis-cli -u URL ping), then start again"
                    ) from exc
                time.sleep(_PAUSE_SECONDS)
            except redis.RedisError as exc:
                raise StateFailed(f"{self._shown}: the server refused: {refusal(exc)}") from exc

    def _superseded(self) -> StaleClient:
        return StaleClient(
            f"{self._shown} is held by another process now, or the server has lost it; this process must not write it "
            "any more: open it again to take it over"
        )
