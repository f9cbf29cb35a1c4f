"""Detection of connections without a call to a port with certificates.

gRPC does not report failed handshakes: so each handshake triggers a look at the connected peers, and those that left
without a call are logged."""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections import Counter
from pathlib import Path

logger = logging.getLogger(__name__)

_POLL_SECONDS, _LOOK_SHARE = 1.0, 0.02
"""Least interval of looks, and their largest share of time: one takes some microseconds a connection of the machine."""
_GONE_SECONDS = 10.0
"""gRPC's time limit of a handshake."""
_WARN_SECONDS = 60.0
_MAX_NAMED = 5


class SilentConnections:
    """Peers without a call at one port. Thread-safe."""

    def __init__(self) -> None:
        self.port = 0
        """Port, once it is known."""
        self._lock = threading.Lock()
        self._look_at = self._warn_at = 0.0
        self._seen: set[str] = set()
        self._called: set[str] = set()
        self._gone: Counter[str] = Counter()
        self._timer: threading.Timer | None = None

    def begun(self) -> None:
        """React to the start of a handshake of an unknown peer."""
        if time.monotonic() < self._look_at or not self._lock.acquire(blocking=False):
            return
        try:
            self._update()
            if self._timer is None:
                self._schedule_report()
        finally:
            self._lock.release()

    def called(self, peer: str) -> None:
        """Record that a connection, by gRPC's name of the peer, has made a call."""
        self._called.add(peer)

    def _update(self) -> None:
        began = time.monotonic()
        before, there, called = self._called.copy(), _connected(self.port), self._called.copy()
        for peer in self._seen - there - called:
            self._gone[peer.partition(":")[2].rpartition(":")[0]] += 1
        self._seen = there - called
        self._called -= before - there
        self._look_at = (now := time.monotonic()) + max(_POLL_SECONDS, (now - began) / _LOOK_SHARE)

    def _schedule_report(self) -> None:
        self._timer = threading.Timer(max(_GONE_SECONDS, self._warn_at - time.monotonic()), self._report)
        self._timer.daemon = True
        self._timer.start()

    def _report(self) -> None:
        with self._lock:
            self._update()
            self._timer = None
            if self._seen:
                self._schedule_report()
            if not self._gone:
                return
            self._warn_at = time.monotonic() + _WARN_SECONDS
            gone, self._gone = self._gone, Counter()
        named = ", ".join(f"{host} ({count} seen)" for host, count in gone.most_common(_MAX_NAMED))
        more = f" and {len(gone) - _MAX_NAMED} more" if len(gone) > _MAX_NAMED else ""
        logger.warning(
            "refused: connections to port %d from %s%s ended without a call: a process there shows no certificate, an "
            "expired one or one of another authority, or rejects the one of this role (check with 'geartrain health')",
            self.port,
            named,
            more,
        )


def _connected(port: int) -> set[str]:
    """Return the peers connected to a port of this machine, by gRPC's names; none where they are unknown."""
    found = set()
    its = re.compile(rf": [0-9A-F]+:{port:04X} ([0-9A-F]+):([0-9A-F]+) 0[18] ")  # established, or closed by the peer
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        try:
            text = Path(f"/proc/self/net/{table}").read_text(encoding="ascii")
        except OSError:
            continue
        for address, remote_port in its.findall(text):
            words = (bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8))
            host = socket.inet_ntop(family, b"".join(words))
            if family == socket.AF_INET6:
                host = host.removeprefix("::ffff:") if "." in host else f"%5B{host}%5D"
            found.add(f"ipv{6 if '%' in host else 4}:{host}:{int(remote_port, 16)}")
    return found
