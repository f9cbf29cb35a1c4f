"""Options of every gRPC connection, and constants that both ends share."""

from __future__ import annotations

from typing import Any

WAITS_KEY = "geartrain-waits"
"""Metadata key of a call that may wait for other callers: the shard then holds no thread for it meanwhile."""

CONNECT_SECONDS = 1.0
"""Longest wait of a retried call for a connection.

A refused connection is known at once; one to a loaded or distant machine takes several tenths of a second.
"""


def seconds_to_connect(attempt_seconds: float) -> float:
    """Return how long an attempt with this deadline waits for a connection.

    The wait must end before the attempt does, or the caller could not know that nothing was sent.
    """
    return min(CONNECT_SECONDS, attempt_seconds / 2)


HANDSHAKE_SECONDS = 10.0
"""Longest time that a server keeps a connection before authentication. (Clients give up long before.)"""

PING_SECONDS = 30.0
"""Interval of keepalive pings on a connection without traffic, while a call waits for its reply."""


def channel_options(
    max_message_bytes: int, connect_seconds: float = CONNECT_SECONDS, ping_seconds: float = PING_SECONDS
) -> list[tuple[str, Any]]:
    """Return the channel and server options of every Geartrain connection: message limits, and quick reconnects.

    A connection that is not made within ``connect_seconds`` is tried again.
    """
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", round(connect_seconds * 1000)),  # it also bounds an attempt
        ("grpc.max_reconnect_backoff_ms", 2000),
        # A name may have another address a moment later, as of a restarted container (gRPC: 30 s); an unanswered
        # query is retried (gRPC: after two minutes).
        ("grpc.dns_min_time_between_resolutions_ms", 1000),
        ("grpc.dns_ares_query_timeout", 5000),
        ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_SECONDS * 1000)),
        ("grpc.keepalive_time_ms", round(ping_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.max_pings_without_data", 0),
        # A server would close the connection of a client that pings it more often than every 5 minutes without
        # traffic, and so end every call that takes that long.
        ("grpc.http2.max_ping_strikes", 0),
        # A new channel opens a new connection rather than share one that may be dead.
        ("grpc.use_local_subchannel_pool", 1),
    ]
