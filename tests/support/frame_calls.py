"""One call over a connection of the data plane, its frames written and read by tests/support/frame_codec.py."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from geartrain.ams.kernels import _core
from tests.support import frame_codec
from tests.support.frame_codec import Described

NUMBERS = itertools.count(1)
PLAIN: Described = {
    "stream": "",
    "table_incarnation": 0,
    "incarnation": 0,
    "sequence": 0,
    "oldest_unacknowledged": 0,
    "shard_incarnation": 0,
    "cluster_version": 0,
    "dtype": 0,
}


def dial(way: str, socket: str, secret: bytes, port: int, **limits: Any) -> _core.DataConnection:
    """A connection to an offer of a server of this machine."""
    if way == "ring":
        return _core.connect_ring(socket, secret, 10.0, **limits)
    return _core.connect_tcp("127.0.0.1", port, secret, 10.0, uses_tls=way == "tls", **limits)


def mailboxes(connection: _core.DataConnection) -> int:
    """How many a connection has; one by TCP has none."""
    return connection.num_mailboxes if isinstance(connection, _core.RingConnection) else 0


def pull(table: str, ids: Sequence[int], dim: int = 4, **more: Any) -> Described:
    return {**PLAIN, "kind": "pull", "table": table, "ids": np.array(ids, np.int64).tobytes(), "dim": dim, **more}


def push(table: str, ids: Sequence[int], dim: int = 4, *, kind: str = "push", **more: Any) -> Described:
    rows = np.ones((len(ids), dim), np.float32).tobytes()
    return {**pull(table, ids, dim), "kind": kind, "rows": rows, **more}


def rows_bytes(one: Described) -> int:
    return len(one["ids"]) // 8 * one["dim"] * 4 if one["kind"] == "pull" else 0


def begin(connection: _core.DataConnection, operations: Sequence[Described], seconds: float = 10.0) -> tuple[Any, int]:
    """Send a request; its call and number."""
    number = next(NUMBERS)
    frame = frame_codec.request(number, seconds, operations)
    room = sum(rows_bytes(operation) + len(operation["ids"]) + 2048 for operation in operations)
    call = connection.begin(len(frame), room)
    call.room(len(frame))[:] = np.frombuffer(frame, np.uint8)
    call.send()
    return call, number


def ask(connection: _core.DataConnection, *operations: Described, seconds: float = 10.0) -> list[Described]:
    """The results of one call."""
    call, number = begin(connection, operations, seconds)
    assert call.wait(seconds)
    return frame_codec.parsed_reply(call.reply(), number, [rows_bytes(operation) for operation in operations])


def expected(ids: Sequence[int], dim: int = 4) -> bytes:
    """What a ToyHandler answers to a pull."""
    rows = np.array(ids)[:, None] * 1000 + np.arange(dim)
    return rows.astype(np.float32).tobytes()


def flipped(frame: bytes, at: int) -> bytes:
    return frame[:at] + struct.pack("B", frame[at] ^ 0x10) + frame[at + 1 :]
