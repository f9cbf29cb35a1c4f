"""Port of the data plane: row requests that clients send in frames to the shard's engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from geartrain.ams.kernels import _core
from geartrain.ams.server.machine import threads_bound_to
from geartrain.ams.server.shard import Shard
from geartrain.ams.values.config import is_loopback
from geartrain.ams.values.errors import ConfigError
from geartrain.ams.values.shard_messages import DataPlaneOffer

logger = logging.getLogger(__name__)

_PORTS_TRIED = 64
"""Number of ports tried from the host's data port on: a host may hold that many shards, each with a port of its own."""


class DataPlanePort:
    """Port for pulls, pushes and assigns of one shard. Thread-safe.

    It is bound at the first offer.
    """

    def __init__(
        self,
        shard: Callable[[], Shard],
        host: str,
        port: int,
        *,
        uses_tls: bool = False,
        cpus: Sequence[int] = (),
    ) -> None:
        """``shard`` may raise a GeartrainError: then nothing is offered.

        Clients of other machines connect to ``host`` and ``port``, or one of the next if other shards have that; 0: a
        free one; without a ``host`` there are none. With ``uses_tls`` they must use TLS. Its threads are bound to
        ``cpus``; empty: they are not bound.

        Raises ConfigError if TLS is required without OpenSSL 3; on loopback rows then go through shared memory alone.
        """
        if uses_tls and host:
            try:
                _core.load_tls()
            except ConfigError as exc:
                if not is_loopback(f"[{host}]:0" if ":" in host else f"{host}:0"):
                    raise
                logger.warning("rows go through shared memory alone here: %s", exc)
                host = ""
        self._shard = shard
        self._host, self._port, self._uses_tls, self._cpus = host, port, uses_tls, cpus
        self._lock = threading.Lock()
        self._server: _core.DataServer | None = None
        self._is_closed = False

    def offer(self, grant: _core.Grant | None = None) -> DataPlaneOffer:
        """Return the offer of one connection with the rights of ``grant`` (None: all), or the reason why there is none.

        Raises what ``shard`` raises.
        """
        try:
            with self._lock:
                if self._is_closed:
                    return DataPlaneOffer(reason="this shard is ending")
                if self._server is None:
                    with threads_bound_to(self._cpus):
                        self._server = self._listening(_core.EngineHandler(self._shard().engine))
                socket, secret, port = self._server.offer(grant)
        except (OSError, RuntimeError) as exc:
            return DataPlaneOffer(reason=str(exc))
        return DataPlaneOffer(socket=socket, secret=secret, port=port, uses_tls=self._uses_tls)

    def _listening(self, handler: _core.Handler) -> _core.DataServer:
        last = min(self._port + _PORTS_TRIED - 1, 65_535) if self._port else 0
        failure: Exception | None = None
        for port in range(self._port, last + 1):
            try:
                return _core.DataServer(
                    handler, host=self._host, port=port, uses_tls=self._uses_tls, warn=logger.warning
                )
            except (OSError, RuntimeError) as exc:
                failure = exc
        logger.warning(
            "clients of other machines cannot reach rows here: %s (%s:%d); give a --data-port that is free",
            failure,
            self._host,
            last,
        )
        return _core.DataServer(handler, warn=logger.warning)

    @property
    def num_connections(self) -> int:
        """Number of connections."""
        return 0 if self._server is None else self._server.num_connections

    @property
    def num_mailboxes(self) -> int:
        """Number of memory mailboxes shared with clients."""
        return 0 if self._server is None else self._server.num_mailboxes

    def close(self) -> None:
        """Finish the call under way, close all connections, offer no more. Idempotent."""
        with self._lock:
            self._is_closed = True
        if self._server is not None:
            self._server.close()
