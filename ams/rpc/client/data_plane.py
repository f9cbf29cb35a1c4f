"""Client side of the data plane: pulls, pushes and assigns go to a shard in frames, by compiled code.

A client asks the shard for a connection over gRPC: at the first call for its rows, and when the connection is lost.
Compiled code makes the calls (``ams/client/rows/row_calls.py``). Frames and memory are described in
docs/explanation/frames.md. Rows of a shard on this machine lie in shared memory; to others they go by TCP. On the
shard's machine a timed-out call leaves its memory to the shard for good; elsewhere it closes the connection. A forked
child has none of its parent's connections.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from geartrain.ams.kernels import _core
from geartrain.ams.rpc.carrier import AttemptFailed, ConnectionRefused, NotSent
from geartrain.ams.values.config import split_address
from geartrain.ams.values.errors import ConfigError, DataPortClosed
from geartrain.ams.values.interrupts import uninterrupted
from geartrain.ams.values.shard_messages import DataPlaneOffer

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
"""Longest time to connect and be greeted; an unused secret expires after it."""
_OFFER_SECONDS = 5.0
"""Longest wait for an offer: the shard's gRPC threads answer it at once."""

connect_tcp = _core.connect_tcp


class DataPlane:
    """The connection of a client to one shard, for its calls by compiled code. Thread-safe."""

    def __init__(
        self,
        address: str,
        ask: Callable[[float], DataPlaneOffer],
        *,
        shares_memory: bool = True,
        needs_tls: bool = False,
    ) -> None:
        """``ask`` requests an offer from the shard within some seconds; it raises AttemptFailed, or the shard's error.

        ``shares_memory``: use shared memory with a shard of this machine; False: TCP there, too. ``needs_tls``: refuse
        TCP without TLS; TLS is used in any case with a shard that offers it.
        """
        self._address = address
        self._host = split_address(address)[0]
        self._shares_memory = shares_memory
        self._needs_tls, self._uses_tls = needs_tls, False
        self._ask = ask
        self._lock = threading.Lock()
        self._connection: _core.DataConnection | None = None
        self._is_closed = False

    @property
    def connection(self) -> _core.DataConnection | None:
        """Present connection; None: not made yet, or lost."""
        connection = self._connection
        return None if connection is None or connection.is_lost else connection

    @property
    def num_mailboxes(self) -> int:
        """Number of memory mailboxes shared with the shard."""
        connection = self._connection
        return connection.num_mailboxes if isinstance(connection, _core.RingConnection) else 0

    def connect(self, seconds: float = _OFFER_SECONDS) -> _core.DataConnection:
        """Return the present connection, or make one. The shard is asked for it for ``seconds`` at most.

        Raises AttemptFailed, the shard's error, or DataPortClosed: the shard answers, but cannot be connected to. Under
        TLS also ConfigError: one of the two has no OpenSSL 3, or ``needs_tls`` and the shard does not offer it.
        """
        return self.connection or uninterrupted(partial(self._connected, min(seconds, _OFFER_SECONDS)))

    def may_go_on(self, *, is_late: bool) -> bool:
        """Return whether the connection is usable after an unfinished call, which was late or lost the connection."""
        connection = self.connection
        if isinstance(connection, _core.RingConnection):
            if not connection.has_refused:  # a late call abandons its mailbox; or there is a newer connection
                return True
            self._shares_memory = False
        elif connection is None or not is_late:
            return connection is not None
        connection.close()
        return False

    def close(self) -> None:
        """Close the connection; calls under way fail with AttemptFailed. Idempotent."""
        self._is_closed = True
        connection = self._connection
        if connection is not None:
            connection.close()

    def _connected(self, seconds: float) -> _core.DataConnection:
        with self._lock:
            if (connection := self.connection) is None:
                connection = self._connection = self._made(seconds)
                is_near = isinstance(connection, _core.RingConnection)
                way = "through shared memory" if is_near else "by TCP under TLS" if self._uses_tls else "by TCP"
                logger.info("rows of the shard at %s go %s", self._address, way)
        if self._is_closed:
            connection.close()
        return connection

    def _made(self, seconds: float) -> _core.DataConnection:
        if self._is_closed:
            raise NotSent(f"shard at {self._address}: the connection is closed")
        offer = self._offer(seconds)
        if self._shares_memory:
            try:
                return _core.connect_ring(offer.socket, offer.secret, CONNECT_SECONDS)
            except (OSError, RuntimeError) as exc:
                logger.debug("shard at %s shares no memory: %s", self._address, exc)
        try:
            return self._by_tcp(offer)
        except (OSError, RuntimeError):
            offer = self._offer(seconds)  # a shard that has died meanwhile gives no offer
        try:
            return self._by_tcp(offer)
        except (OSError, RuntimeError) as exc:
            if str(exc).startswith("no address of"):
                raise ConnectionRefused(f"shard at {self._address}: the name of the host cannot be resolved") from exc
            raise DataPortClosed(
                f"the shard at {self._address} answers, but its port for rows, {self._host}:{offer.port}, does not "
                f"({exc}); open it in the firewall, or start the server with a port that is open: --data-port"
                if offer.port
                else f"the shard at {self._address} has no port for rows of other machines' clients: all that it tried "
                "are in use (its log names them); start the server with one that is free: --data-port"
            ) from exc

    def _by_tcp(self, offer: DataPlaneOffer) -> _core.DataConnection:
        if self._needs_tls and not offer.uses_tls:
            raise ConfigError(
                f"the shard at {self._address} offers rows by TCP in plain text, which this client does not take; "
                "start its server with security.folder, too"
            )
        self._uses_tls = offer.uses_tls
        return connect_tcp(self._host, offer.port, offer.secret, CONNECT_SECONDS, uses_tls=offer.uses_tls)

    def _offer(self, seconds: float) -> DataPlaneOffer:
        offer = self._ask(seconds)
        if offer.reason:
            raise AttemptFailed(f"shard at {self._address} takes no connection for rows: {offer.reason}")
        return offer
