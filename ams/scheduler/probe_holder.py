"""Query of the process at a shard's address: a newcomer there may be its successor, or a duplicate."""

from __future__ import annotations

import socket
from contextlib import suppress

from geartrain.ams.rpc.carrier import ConnectionRefused
from geartrain.ams.rpc.client.calls import GrpcCalls
from geartrain.ams.rpc.services import SHARD
from geartrain.ams.values.config import split_address
from geartrain.ams.values.errors import ProtocolError
from geartrain.ams.values.rpc import Ping

_ANSWER_SECONDS = 1.0


def incarnations_at(address: str) -> set[int]:
    """Return the incarnations of all processes that answer at ``"host:port"``; 0: one without a shard.

    A name may resolve to several machines: all are asked. Raises AttemptFailed if one does not answer.
    """
    host, port = split_address(address)
    hosts = {host}
    with suppress(OSError):  # an unresolvable one is asked by its name: gRPC reports the error
        hosts = {str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    answers = [_incarnation_at(f"[{name}]:{port}" if ":" in name else f"{name}:{port}") for name in hosts]
    return {incarnation for incarnation in answers if incarnation is not None}


def _incarnation_at(address: str) -> int | None:
    calls = GrpcCalls(SHARD, "shard", address, any_role=True)
    try:
        return calls.call(Ping(), _ANSWER_SECONDS).incarnation
    except ConnectionRefused:
        return None
    except ProtocolError:  # another role
        return 0
    finally:
        calls.close()
