"""The data plane, from the client's end: pulls, pushes and assigns go to a shard in frames, by compiled code.

A client asks the shard for a connection over gRPC: the first call for its rows does, and one that finds it lost. Who
calls over it is compiled code (``ams/client/rows/row_calls.py``). Frames and memory are those of
docs/explanation/frames.md. Rows of a shard on this machine lie in memory that both share; to others they go by TCP. On
the shard's machine a call whose reply does not come in time leaves its memory to the shard for good; elsewhere it ends
the connection. A forked child has none of its parent's connections.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial

from geartrain.ams.kernels import _core
from geartrain.ams.rpc.carrier import AttemptFailed, NobodyThere, NotSent
from geartrain.ams.values.config import split_address
from geartrain.ams.values.errors import ConfigError, DataPortClosed
from geartrain.ams.values.interrupts import shielded
from geartrain.ams.values.shard_messages import DataPlaneOffer

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
"""To connect and be greeted; a secret that was not used for so long is void."""
_OFFER_SECONDS = 5.0
"""A shard says at once how it can be connected to: its threads of gRPC do, which wait for nothing."""

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
        """``ask`` asks the shard for an offer, for so many seconds; it raises AttemptFailed if that got lost, or what
        the shard says.

        ``shares_memory``: with a shard of this machine; False: rows go by TCP there, too. ``needs_tls``: by TCP, or not
        at all; a shard that offers it is spoken to so in any case.
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
        """What there is now; None: it was not made yet, or is lost."""
        connection = self._connection
        return None if connection is None or connection.is_lost else connection

    @property
    def num_mailboxes(self) -> int:
        """Pieces of memory that are shared with the shard."""
        connection = self._connection
        return connection.num_mailboxes if isinstance(connection, _core.RingConnection) else 0

    def connect(self, seconds: float = _OFFER_SECONDS) -> _core.DataConnection:
        """The connection there is, or one that is made now. The shard is asked for it for ``seconds`` at most.

        Raises AttemptFailed, what the shard says, and DataPortClosed: the shard answers, and lets nobody connect. Under
        TLS also ConfigError: one of the two has no OpenSSL 3, or ``needs_tls`` and the shard does not speak it.
        """
        return self.connection or shielded(partial(self._connected, min(seconds, _OFFER_SECONDS)))

    def may_go_on(self, *, is_late: bool) -> bool:
        """Whether the connection is good for more calls: one came to no end, for want of time or of the connection."""
        connection = self.connection
        if isinstance(connection, _core.RingConnection):
            if not connection.has_refused:  # a late call gives its mailbox up; or another was made since
                return True
            self._shares_memory = False
        elif connection is None or not is_late:
            return connection is not None
        connection.close()
        return False

    def close(self) -> None:
        """End the connection; calls under way fail with AttemptFailed. Idempotent."""
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
            offer = self._offer(seconds)  # one that has died meanwhile makes none
        try:
            return self._by_tcp(offer)
        except (OSError, RuntimeError) as exc:
            if str(exc).startswith("no address of"):
                raise NobodyThere(f"shard at {self._address}: the name of the host cannot be resolved") from exc
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
