"""User of the process at the other end of a connection within this machine, from the kernel's table of sockets."""

from __future__ import annotations

import ipaddress
import sys
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote

_ESTABLISHED = "01"
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


def user_of_peer(peer: str) -> int | None:
    """Return the user of the caller at ``peer``, in gRPC's form (``ipv4:127.0.0.1:40112``).

    None if the connection is not local, has ended, or may be of several users. Reads the table of connections.
    """
    address, _, port = unquote(peer.partition(":")[2]).rpartition(":")
    try:
        ends = _as_the_kernel_writes(address.strip("[]"), int(port))
    except ValueError:
        return None
    users = set()
    for table in _TABLES:
        with suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[1] in ends and fields[3] == _ESTABLISHED:
                    users.add(int(fields[7]))
    return users.pop() if len(users) == 1 else None


def _as_the_kernel_writes(address: str, port: int) -> set[str]:
    """Return an address in its IPv4 and IPv6 forms, in words of the machine's byte order, with its port."""
    known = ipaddress.ip_address(address)
    packed = [known.packed]
    if known.version == 4:
        packed.append(ipaddress.ip_address(f"::ffff:{address}").packed)
    elif known.ipv4_mapped is not None:
        packed.append(known.ipv4_mapped.packed)
    return {f"{_words(form)}:{port:04X}" for form in packed}


def _words(packed: bytes) -> str:
    words = (packed[at : at + 4] for at in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
