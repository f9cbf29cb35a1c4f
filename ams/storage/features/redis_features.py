"""Feature store in a Redis server, shared by all processes that name it.

One MGET a read. Numpy packs the commands: redis-py takes longer to pack a thousand keys than Redis to find them.
Redis-py parses the replies (hiredis where it is installed).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import numpy as np
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from geartrain.ams.storage.features.store import (
    DEFAULT_RECORD_SECONDS,
    Counters,
    Seals,
    StoreCounts,
    checked_read,
    checked_records,
)
from geartrain.ams.values.errors import ConfigError, InvalidArgument, StateFailed, StoreUnavailable
from geartrain.ams.values.specs import Ids
from geartrain.ams.values.text import shown_url

_WRITTEN_AT_ONCE = 1000
_READ_BYTES = 1 << 20
_PASSWORD_FILE = "password_file"
RedisReply = object


class RedisFeatures:
    """A :class:`FeatureStore` in a Redis server, under the keys ``geartrain:NAMESPACE:`` + id (8 bytes).

    Two bounds keep it small: a record goes ``record_seconds`` after it was written, and the server's own ``maxmemory``.
    ``maxmemory-policy volatile-lru`` evicts records, and spares what must stay (whatever has no expiry); under
    ``noeviction`` a full server refuses writes, which raises StateFailed. Connections are made when needed: a server
    that came back is found again by the next call.
    """

    def __init__(
        self,
        url: str,
        namespace: str,
        *,
        record_seconds: float | None = DEFAULT_RECORD_SECONDS,
        timeout_seconds: float = 5.0,
    ) -> None:
        """Connect once, to see that it answers. Arguments and errors as in ``open_store``."""
        if record_seconds is not None and not (math.isfinite(record_seconds) and record_seconds >= 0.001):
            raise InvalidArgument(f"record_seconds is {record_seconds!r}; it must be at least 0.001, or None for ever")
        if not (math.isfinite(timeout_seconds) and timeout_seconds > 0):
            raise InvalidArgument(f"timeout_seconds is {timeout_seconds!r}; it must be above 0")
        self.namespace = namespace
        self._seals = Seals(namespace)
        self._prefix = f"geartrain:{namespace}:".encode()
        self._expiry = b"" if record_seconds is None else _argument(b"PX") + _argument(b"%d" % (record_seconds * 1000))
        self._counters = Counters()
        self._shown_url = shown_url(url)
        if self._shown_url.endswith("..."):
            raise ConfigError(
                f"{self._shown_url!r} is no Redis URL, or its password has @, /, ? or #; give redis://HOST:PORT/DB and "
                "keep the password in a file: redis://HOST:PORT/0?password_file=/run/secrets/redis"
            )
        url, password = _password_of_file(url)
        try:
            self._pool = redis.ConnectionPool.from_url(
                url,
                **password,
                socket_timeout=timeout_seconds,
                socket_connect_timeout=timeout_seconds,
                socket_read_size=_READ_BYTES,
                retry=Retry(NoBackoff(), 0),
            )
        except (ValueError, TypeError):  # which may quote the URL
            raise ConfigError(f"{self._shown_url!r} is no Redis URL; give redis://HOST:PORT/DB") from None
        self._call(b"*1\r\n" + _argument(b"PING"))

    def read(self, ids: Ids) -> list[bytes | None]:
        """Return the values of ids, None for a missing or damaged one; one round trip."""
        ids = checked_read(ids)
        if not len(ids):
            return []
        [sealed] = self._call(self._command(b"MGET", ids))
        values, damaged = self._seals.unseal(ids, sealed)  # type: ignore[arg-type]
        self._counters.read(values, damaged)
        return values

    def write(self, ids: Ids, values: Sequence[bytes]) -> None:
        """Store values; one round trip for a thousand records."""
        ids, kept = checked_records(checked_read(ids), values)
        count = 5 if self._expiry else 3
        set_key = b"*%d\r\n" % count + _argument(b"SET")
        for start in range(0, len(ids), _WRITTEN_AT_ONCE):
            part = ids[start : start + _WRITTEN_AT_ONCE]
            sealed = self._seals.seal(part, kept[start : start + _WRITTEN_AT_ONCE])
            keys = self._key_arguments(part).view(f"V{len(self._key_head) + 10}").reshape(-1).tolist()
            pieces = [set_key + key + _argument(value) + self._expiry for key, value in zip(keys, sealed, strict=True)]
            self._call(b"".join(pieces), len(part))
        self._counters.wrote(len(kept))

    def remove(self, ids: Ids) -> None:
        """Remove the records of ids; one round trip."""
        ids = checked_read(ids)
        if len(ids):
            self._call(self._command(b"DEL", ids))

    def counts(self) -> StoreCounts:
        """Return the counts of this process's calls; evictions of the server and other clients are unknown."""
        return self._counters.counts()

    def close(self) -> None:
        self._pool.disconnect()

    @property
    def _key_head(self) -> bytes:
        return b"$%d\r\n" % (len(self._prefix) + 8) + self._prefix

    def _key_arguments(self, ids: Ids) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        """Return the keys as arguments of a command, uint8 [N, K]."""
        head = np.frombuffer(self._key_head, np.uint8)
        arguments = np.empty((len(ids), len(head) + 10), np.uint8)
        arguments[:, : len(head)] = head
        arguments[:, len(head) : -2] = ids.astype("<i8").view(np.uint8).reshape(-1, 8)
        arguments[:, -2:] = (13, 10)
        return arguments

    def _command(self, name: bytes, ids: Ids) -> bytes:
        return b"*%d\r\n" % (1 + len(ids)) + _argument(name) + self._key_arguments(ids).tobytes()

    def _call(self, command: bytes, num_replies: int = 1) -> list[RedisReply]:
        """Send a command and return the replies; retry once on a broken connection, as all commands are idempotent."""
        with self._translated():
            connection = self._pool.get_connection()
            try:
                try:
                    return _exchange(connection, command, num_replies)
                except redis.ConnectionError:  # not a time-out: nobody is made to wait twice
                    return _exchange(connection, command, num_replies)
            finally:
                self._pool.release(connection)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except redis.AuthenticationError as exc:
            raise StateFailed(f"the Redis server {self._shown_url} refused: {exc}") from exc
        except (redis.ConnectionError, redis.TimeoutError) as exc:
            raise StoreUnavailable(
                f"the Redis server {self._shown_url} does not answer: {exc}; see that it runs and can be reached from "
                "here (redis-cli -u URL ping), then try again"
            ) from exc
        except redis.RedisError as exc:
            raise StateFailed(f"the Redis server {self._shown_url} refused: {refusal(exc)}") from exc


def refusal(error: redis.RedisError) -> str:
    """Return why a server refused, and the remedy."""
    said = str(error)
    if said.startswith("DENIED"):  # of which it says a whole page
        return (
            "it is in protected mode, in which it takes nobody from another machine; on a private network start it "
            "with --protected-mode no, or give it a password and name a file that holds it, redis://HOST:PORT/0?password_file=FILE"
        )
    if "maxmemory" in said:
        return f"{said}; raise its maxmemory, or start it with --maxmemory-policy volatile-lru"
    return said


def _exchange(connection: Any, command: bytes, num_replies: int) -> list[RedisReply]:
    connection.send_packed_command([command])
    replies: list[RedisReply] = []
    refusal: redis.ResponseError | None = None
    for _ in range(num_replies):  # all of them, or the next caller would get the rest
        try:
            replies.append(connection.read_response(disconnect_on_error=True))
        except redis.ResponseError as exc:
            refusal = exc
    if refusal is not None:
        raise refusal
    return replies


def _argument(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def _password_of_file(url: str) -> tuple[str, dict[str, str]]:
    """Return the URL without ``password_file``, and the first line of that file. Raises ConfigError."""
    place, _, query = url.partition("?")
    options = parse_qsl(query, keep_blank_values=True)
    path = dict(options).get(_PASSWORD_FILE)
    if path is None:
        return url, {}
    rest = urlencode([(name, value) for name, value in options if name != _PASSWORD_FILE])
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{_PASSWORD_FILE} is {path!r}, which cannot be read: {exc}") from exc
    if not lines or not lines[0]:
        raise ConfigError(f"{_PASSWORD_FILE} is {path!r}, whose first line is empty; write the password there")
    return f"{place}?{rest}" if rest else place, {"password": lines[0]}
