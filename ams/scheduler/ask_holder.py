"""Query of the process at a shard's address: a newcomer there may be the holder's successor, or its duplicate."""

from __future__ import annotations

import socket
from contextlib import suppress

from geartrain.ams.rpc.carrier import NobodyThere
from geartrain.ams.rpc.client.calls import GrpcCalls
from geartrain.ams.rpc.services import SHARD
from geartrain.ams.values.config import split_address
from geartrain.ams.values.errors import ProtocolError
from geartrain.ams.values.rpc import Ping

_ANSWER_SECONDS = 1.0


def incarnations_at(address: str) -> set[int]:
    """Return the incarnations of all that answer at ``"host:port"``; 0: one that has no shard yet, or is none.

    A name may be that of several machines: all of them are asked. Raises AttemptFailed if one keeps silent.
    """
    host, port = split_address(address)
    hosts = {host}
    with suppress(OSError):  # one that cannot be resolved is asked for by its name: gRPC says what is wrong
        hosts = {str(found[4][0]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    answers = [_incarnation_at(f"[{name}]:{port}" if ":" in name else f"{name}:{port}") for name in hosts]
    return {incarnation for incarnation in answers if incarnation is not None}


def _incarnation_at(address: str) -> int | None:
    calls = GrpcCalls(SHARD, "shard", address, any_role=True)
    try:
        return calls.call(Ping(), _ANSWER_SECONDS).incarnation
    except NobodyThere:
        return None
    except ProtocolError:  # another role
        return 0
    finally:
        calls.close()
