"""The data plane, from the client's end: pulls, pushes and assigns go to a shard in frames, by compiled code.

A client asks the shard for a connection over gRPC, on a thread; nobody waits for that: until it is there, and wherever
it cannot be, calls are messages. Who calls over it is compiled code (``ams/client/rows/row_calls.py``). Frames and
memory are those of docs/explanation/frames.md. On the shard's machine a call whose reply does not come in time leaves
its memory to the shard for good; elsewhere it ends the connection, and for a while there is none. A forked child has
none of its parent's connections.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from geartrain.ams.kernels import _core
from geartrain.ams.rpc.carrier import AttemptFailed
from geartrain.ams.values.config import split_address
from geartrain.ams.values.shard_messages import DataPlaneOffer

logger = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 600.0
"""After a refusal no connection is asked for so long; after each further one twice as long, up to the second."""
DISTRUST_SECONDS = 30.0
"""After a call without an answer by TCP there is no connection for so long: the way may let only gRPC pass."""
CONNECT_SECONDS = 5.0
"""To connect and be greeted; a secret that was not used for so long is void."""
_LOST_SECONDS = 30.0
"""When the last attempt to connect began so long ago, none is under way."""

connect_tcp = _core.connect_tcp


def _in_background(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="geartrain-connect", daemon=True).start()


class DataPlane:
    """The connection of a client to one shard, for its calls by compiled code. Thread-safe."""

    def __init__(
        self,
        address: str,
        ask: Callable[[], DataPlaneOffer],
        *,
        near: bool = True,
        far: bool = False,
        tell: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        begin: Callable[[Callable[[], None]], None] = _in_background,
    ) -> None:
        """``ask`` asks the shard for an offer. It raises AttemptFailed if that got lost: then the next call tries
        again. Whatever else prevents a connection means that there is none for a while. It goes through memory that is
        shared with a shard ``near``, on this machine, or by TCP to one ``far``. ``tell`` is told which way rows go.

        ``begin`` has the connection made: by default on a thread, for no call is to wait for it, and Ctrl-C, which may
        break off anything on the main thread, is not to leave gRPC in disorder.
        """
        self._peer = f"shard at {address}"
        self._host = split_address(address)[0]
        self._near, self._far = near, far
        self._ask = ask
        self._tell = tell
        self._clock = clock
        self._begin = begin
        self._lock = threading.Lock()
        self._connection: _core.DataConnection | None = None
        self._making_since = -math.inf
        self._off_until = -math.inf
        self._pause = FIRST_PAUSE_SECONDS
        self._is_closed = False

    @property
    def connection(self) -> _core.DataConnection | None:
        """What there is now; None: it is not there yet, or lost."""
        connection = self._connection
        return None if connection is None or connection.is_lost else connection

    @property
    def num_mailboxes(self) -> int:
        """Pieces of memory that are shared with the shard."""
        connection = self._connection
        return connection.num_mailboxes if isinstance(connection, _core.RingConnection) else 0

    @property
    def is_off(self) -> bool:
        """Whether there is no connection for now, nor will there be one soon."""
        return self._clock() < self._off_until

    def want(self) -> None:
        """Have a connection made, unless there is one, or none is to be had now. Waits for nothing."""
        if self.connection is not None:
            return
        with self._lock:
            now = self._clock()
            if now < self._off_until or now - self._making_since < _LOST_SECONDS:
                return
            self._making_since = now
        try:
            self._begin(self._connect)
        except RuntimeError as exc:  # no thread is to be had
            self._refused(exc)

    def close(self) -> None:
        """End the connection; calls under way fail with AttemptFailed. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._off_until = math.inf
            connection = self._connection
        if connection is not None:
            connection.close()

    def _connect(self) -> None:
        try:
            offer = self._ask()
            if offer.reason:
                self._refused(offer.reason)
                return
            connection = self._connected_to(offer)
        except AttemptFailed as exc:
            logger.debug("%s: no connection for rows: %s", self._peer, exc)
            self._making_since = -math.inf
            return
        except Exception as exc:
            self._refused(exc)
            return
        with self._lock:
            self._connection = connection
            self._making_since = -math.inf
            self._pause = FIRST_PAUSE_SECONDS
        if self._is_closed:
            connection.close()
        is_near = isinstance(connection, _core.RingConnection)
        self._tell("through shared memory" if is_near else "over bulk connections")

    def _connected_to(self, offer: DataPlaneOffer) -> _core.DataConnection:
        """Raises OSError or RuntimeError."""
        if self._near:
            try:
                return _core.connect_ring(offer.socket, offer.secret, CONNECT_SECONDS)
            except (OSError, RuntimeError) as exc:
                if not self._far:
                    raise
                logger.debug("%s shares no memory: %s", self._peer, exc)
        return connect_tcp(self._host, offer.port, offer.secret, CONNECT_SECONDS)

    def had_no_answer(self, connection: _core.DataConnection) -> None:
        """A call got none in time."""
        if isinstance(connection, _core.RingConnection):
            return
        connection.close()
        with self._lock:
            self._off_until = max(self._off_until, self._clock() + DISTRUST_SECONDS)

    def _refused(self, reason: str | Exception) -> None:
        with self._lock:
            self._off_until = max(self._off_until, self._clock() + self._pause)
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
            self._making_since = -math.inf
        ways = ["through shared memory"] * self._near + ["over bulk connections"] * self._far
        self._tell(f"in messages, not {' or '.join(ways)}: {reason}")
