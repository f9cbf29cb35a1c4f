"""The options of every connection, and what both of its ends know."""

from __future__ import annotations

from typing import Any

WAITS_KEY = "geartrain-waits"
"""Metadata of a call that may wait for other callers: the shard then holds no thread for it meanwhile."""

CONNECT_SECONDS = 1.0
"""How long a call waits for a connection if its caller repeats it.

That one is refused is known at once; one to a loaded machine, or a distant one, takes several tenths of a second.
"""


def seconds_to_connect(attempt_seconds: float) -> float:
    """How long an attempt that may take so long waits for a connection.

    It must not end before that does, or nobody could tell that nothing was sent.
    """
    return min(CONNECT_SECONDS, attempt_seconds / 2)


HANDSHAKE_SECONDS = 10.0
"""How long a server leaves a connection open that has not shown who it is. (Who calls gives up long before.)"""

PING_SECONDS = 30.0
"""How often a connection without traffic is asked whether it lives, while a call waits for its reply."""


def channel_options(
    max_message_bytes: int, connect_seconds: float = CONNECT_SECONDS, ping_seconds: float = PING_SECONDS
) -> list[tuple[str, Any]]:
    """Return the channel and server options of every Geartrain connection: message limits, and quick reconnects.

    A connection that does not come about in ``connect_seconds`` is tried anew.
    """
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", round(connect_seconds * 1000)),  # which is also what bounds an attempt
        ("grpc.max_reconnect_backoff_ms", 2000),
        # A name may have another address a moment later, as one of a container that is started anew has (gRPC: 30 s); a
        # question that nobody answers is asked again (gRPC: after two minutes).
        ("grpc.dns_min_time_between_resolutions_ms", 1000),
        ("grpc.dns_ares_query_timeout", 5000),
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_SECONDS * 1000)),
        ("grpc.keepalive_time_ms", round(ping_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        # A server would close the connection of a client that pings it more often than every 5 minutes without
        # traffic: so every call that works that long before it answers.
        ("grpc.http2.max_ping_strikes", 0),
        # A new channel is a new connection, rather than another user of one that may be dead.
        ("grpc.use_local_subchannel_pool", 1),
    ]
