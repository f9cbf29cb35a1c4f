"""Check that a role's port is free before it starts, for a one-sentence error."""

from __future__ import annotations

import contextlib
import errno
import socket

import psutil

from geartrain.ams.values.config import split_address
from geartrain.ams.values.errors import ConfigError, GeartrainError
from geartrain.ams.values.rpc import Ping, Pong
from geartrain.launch.roles import ROLES

_ANSWER_SECONDS = 1.0


def require_free(listen: str, flag: str) -> None:
    """Raise ConfigError if another process listens at ``"host:port"``; names it, and the ``flag`` to change.

    Other faults of the address are reported when it is bound.
    """
    _, port = split_address(listen)
    taken = False
    with contextlib.suppress(OSError):
        taken = port != 0 and is_taken(listen)
    if not taken:
        return
    elsewhere = f"{flag} {listen.removesuffix(f':{port}')}:0 picks a free port"
    pong = role_at(listen)
    if pong is None:
        raise ConfigError(f"{listen} is in use by {user_of(port)}; end that, or listen elsewhere: {elsewhere}")
    if pong.role == "scheduler":
        raise ConfigError(
            f"{listen} is in use by the scheduler of a cluster that runs (process {pong.pid}): use that cluster "
            f"('geartrain status --scheduler {listen}' shows it), end it, or start this one elsewhere: {elsewhere}"
        )
    raise ConfigError(
        f"{listen} is in use by a {pong.role} of Geartrain (process {pong.pid}); end that, or listen elsewhere: "
        f"{elsewhere}"
    )


def is_taken(listen: str) -> bool:
    """Return whether a process listens at ``"host:port"``. Raises OSError if it cannot be bound for another reason."""
    host, port = split_address(listen)
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        # as gRPC does: a past connection does not occupy the port
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen()
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE:
                raise
            return True
    return False


def role_at(address: str) -> Pong | None:
    """Return the ping answer of the role at ``"host:port"``; None if none answers."""
    from geartrain.ams.rpc.carrier import AttemptFailed
    from geartrain.ams.rpc.client.calls import GrpcCalls

    for role in ROLES.values():
        if role.service is None:
            continue
        calls = GrpcCalls(role.rpc_service(), "role", address, any_role=True)
        try:
            return calls.call(Ping(), _ANSWER_SECONDS)
        except AttemptFailed:
            return None
        except GeartrainError:  # another role, or another program
            continue
        finally:
            calls.close()
    return None


def user_of(port: int) -> str:
    """Return the process that listens at a port of this machine, in words; only its owner and root can see which."""
    with contextlib.suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            address = connection.laddr
            if connection.status == psutil.CONN_LISTEN and address and address.port == port and connection.pid:
                return f"process {connection.pid} ({psutil.Process(connection.pid).name()})"
    return "another process"
