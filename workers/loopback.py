"""Names of torchrun rendezvous backends, and a check whether other machines reach a port."""

from __future__ import annotations

import socket
from contextlib import suppress
from ipaddress import ip_address
from itertools import chain

import psutil

BACKEND = "loopback"
"""Name, in torchrun and pyproject.toml, of the rendezvous of one machine in ``rendezvous.py``."""
BY_SCHEDULER = "geartrain"
"""Name of the rendezvous of several machines."""


def open_address(port: int) -> str | None:
    """Return an address of this machine at which others reach a listener on ``port``; None if there is none."""
    for found in chain.from_iterable(psutil.net_if_addrs().values()):
        if found.family in (socket.AF_INET, socket.AF_INET6) and not ip_address(found.address).is_loopback:
            with suppress(OSError), socket.create_connection((found.address, port), 1.0):
                return str(found.address)
    return None
