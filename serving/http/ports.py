"""Sockets of a service; a process that only holds a port needs few imports."""

from __future__ import annotations

import os
import socket

from geartrain.ams.values.config import NO_FOLDER, ClusterConfig, format_address, split_address
from geartrain.ams.values.errors import ConfigError

BACKLOG = 1024


def certificates_of(config: ClusterConfig) -> str | None:
    """Return the folder of certificates for HTTP: an explicit one; by default none, on loopback."""
    folder = config.security.folder
    return None if folder in (None, NO_FOLDER) or config.serve.insecure else folder


def listening_socket(listen: str, what: str, flag: str = "--listen") -> socket.socket:
    """Listen at ``"host:port"``, which ``flag`` set. Raises ConfigError if that fails; ``what`` names the service."""
    host, port = split_address(listen)
    try:
        family, *_, bind_to = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(bind_to[:2], family=family, backlog=BACKLOG)
    except OSError as exc:
        why = (os.strerror(exc.errno) if exc.errno and exc.errno > 0 else str(exc)).lower()
        raise ConfigError(
            f"cannot {what} at {listen!r}: {why}; {flag} takes an address of this machine and a port that is free "
            "(0 picks one)"
        ) from exc


def held_port(listen: str, flag: str) -> socket.socket:
    """Hold an exclusive port for processes that listen there with :func:`joined_port`. Raises ConfigError."""
    with listening_socket(listen, "serve", flag) as alone:  # a port shared by others would admit this service, too
        address = format_address(split_address(listen)[0], alone.getsockname()[1])
    held = joined_port(address, flag)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # nor may another service join before workers listen
    return held


def joined_port(listen: str, flag: str = "--listen") -> socket.socket:
    """Return a listening socket that shares its port (SO_REUSEPORT): the system spreads connections. Raises
    ConfigError."""
    host, port = split_address(listen)
    family, *_, bind_to = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    joined = socket.socket(family)
    try:
        if family == socket.AF_INET6:  # as listening_socket
            joined.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            joined.setsockopt(socket.SOL_SOCKET, option, 1)
        joined.bind(bind_to[:2])
    except OSError as exc:
        joined.close()
        raise ConfigError(
            f"cannot serve at {listen!r}: {(exc.strerror or str(exc)).lower()}; {flag} takes a port that is free"
        ) from exc
    return joined
