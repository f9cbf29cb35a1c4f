"""Under which names a page of this host answers."""

from __future__ import annotations

import ipaddress
import re
import socket

from geartrain.ams.values.config import split_address


class Names:
    """The names of a host. A page of another site can make its own name mean this machine (DNS rebinding): a browser
    then asks here under that name, which is refused."""

    def __init__(self, listen: str) -> None:
        host, _ = split_address(listen)
        self._names = {"localhost", host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}

    def has(self, host: str) -> bool:
        """Whether the header ``Host`` is of this host: an address, or one of its names."""
        name = re.sub(r":\d+$", "", host).strip("[]").lower()
        try:
            ipaddress.ip_address(name)  # nobody can let a number mean another machine
        except ValueError:
            return name in self._names
        return True
