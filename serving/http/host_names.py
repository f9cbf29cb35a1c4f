"""Host names under which a page of this host answers."""

from __future__ import annotations

import ipaddress
import re
import socket

from geartrain.ams.values.config import split_address


class HostNames:
    """Names of this host. A page of another site can point its own name at this machine (DNS rebinding): a browser then
    sends requests here under that name, which are refused."""

    def __init__(self, listen: str) -> None:
        host, _ = split_address(listen)
        self._names = {"localhost", host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}

    def has(self, host: str) -> bool:
        """Return whether the header ``Host`` is of this host: an address, or one of its names."""
        name = re.sub(r":\d+$", "", host).strip("[]").lower()
        try:
            ipaddress.ip_address(name)  # a number cannot be rebound to another machine
        except ValueError:
            return name in self._names
        return True
