"""The data plane, from the client's end: pulls, pushes and assigns go to a shard in frames, by compiled code.

A client asks the shard for a connection over gRPC, on a thread; nobody waits for that: until it is there, and wherever
it cannot be, calls are messages. Frames and memory are those of docs/explanation/frames.md. On the shard's machine a
call whose reply does not come in time leaves its memory to the shard for good; elsewhere it ends the connection, and
for a while there is none. A forked child has none of its parent's connections.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from geartrain.ams.kernels import _core, ops
from geartrain.ams.rpc.carrier import AttemptFailed
from geartrain.ams.values.config import split_address
from geartrain.ams.values.errors import GeartrainError, InternalError
from geartrain.ams.values.interrupts import held
from geartrain.ams.values.shard_messages import Assign, CallContext, DataPlaneOffer, Done, Pull, Push, Reply

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 600.0
"""After a refusal no connection is asked for so long."""
DISTRUST_SECONDS = 30.0
"""After a call without an answer by TCP there is no connection for so long: the way may let only gRPC pass."""
CONNECT_SECONDS = 5.0
"""To connect and be greeted; a secret that was not used for so long is void."""
_LEAST_SECONDS = 0.05
"""To send a call again whose connection was lost."""
_LOST_SECONDS = 30.0
"""When the last attempt to connect began so long ago, none is under way."""

RowRequest = Pull | Push | Assign
connect_tcp = _core.connect_tcp


def _in_background(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="geartrain-connect", daemon=True).start()


class DataPlane:
    """The connection of a client to one shard. Thread-safe."""

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

    def submit(
        self,
        context: CallContext,
        request: RowRequest,
        timeout_seconds: float | None,
        *,
        alone: bool,
        again: Callable[[float | None], Future[Reply]] | None = None,
    ) -> Future[Reply] | None:
        """Send a request; None: there is no connection for it now, and nothing was sent.

        The reply is waited for by whoever asks for it. ``alone``: it is there when this returns. ``again`` sends the
        same call another way, for the seconds that are left, if the connection is lost meanwhile.
        """
        connection = self._open_connection()
        if connection is None:
            return None
        seconds = math.inf if timeout_seconds is None else timeout_seconds
        reply = _RowReply(self._peer, self, request, time.monotonic() + seconds, again)
        try:
            reply.send(connection, context, 0.0 if seconds == math.inf else seconds)
        except (_core.ConnectionFull, _core.ConnectionLost):
            return None
        if alone:
            reply.settle()
        return reply

    def close(self) -> None:
        """End the connection; calls under way fail with AttemptFailed. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._off_until = math.inf
            connection = self._connection
        if connection is not None:
            connection.close()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, by this end."""
        return self._is_closed

    def _open_connection(self) -> _core.DataConnection | None:
        connection = self._connection
        if connection is not None and not connection.is_lost:
            return connection
        with self._lock:
            now = self._clock()
            if now < self._off_until or now - self._making_since < _LOST_SECONDS:
                return None
            self._making_since = now
        try:
            self._begin(self._connect)
        except RuntimeError as exc:  # no thread is to be had
            self._refused(exc)
        return None

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
            self._off_until = max(self._off_until, self._clock() + PAUSE_SECONDS)
            self._making_since = -math.inf
        ways = ["through shared memory"] * self._near + ["over bulk connections"] * self._far
        self._tell(f"in messages, not {' or '.join(ways)}: {reason}")


def _sent(connection: _core.DataConnection, context: CallContext, request: RowRequest, seconds: float) -> _core.RowCall:
    """Send a request, whose arrays are free when this returns. Raises ConnectionFull or ConnectionLost."""
    ids = np.ascontiguousarray(request.ids)
    if isinstance(request, Pull):
        return _core.begin_pull(
            connection,
            context,
            request.table,
            ids,
            request.out.shape[1],
            ops.DTYPE_CODES[request.out.dtype],
            request.present is not None,
            request.required_sync,
            seconds,
        )
    if isinstance(request, Assign):
        return _core.begin_assign(connection, context, request.table, ids, *ops.as_bits(request.rows), seconds)
    return _core.begin_push(
        connection,
        context,
        request.table,
        ids,
        *ops.as_bits(request.gradients),
        request.lr,
        request.scale,
        dict(request.optimizer_scalars),
        request.group,
        request.step_goes_on,
        seconds,
    )


class _RowReply(Future[Reply]):
    """The reply to a call that was sent: whoever asks for it first waits for it, and writes the rows where they go."""

    def __init__(
        self,
        peer: str,
        plane: DataPlane,
        request: RowRequest,
        deadline: float,
        again: Callable[[float | None], Future[Reply]] | None,
    ) -> None:
        super().__init__()
        self._peer, self._plane, self._request, self._deadline = peer, plane, request, deadline
        self._again = again
        self._call: _core.RowCall | None = None
        """Nobody else may hold it, as a variable of a frame does that an error remembers: its memory ends with it."""
        self._connection: _core.DataConnection | None = None
        self._settling = threading.Lock()

    def send(self, connection: _core.DataConnection, context: CallContext, seconds: float) -> None:
        """Send the request. Raises ConnectionFull or ConnectionLost: it was not sent."""
        self._connection = connection
        # By TCP it takes as long as the shard does; memory is never waited for.
        break_off = None if isinstance(connection, _core.RingConnection) else connection.close
        with held(self._request.buffer_lease, break_off):
            self._call = _sent(connection, context, self._request, seconds)

    def result(self, timeout: float | None = None) -> Reply:  # noqa: ARG002 - a call has a time-out of its own
        """See :class:`concurrent.futures.Future`."""
        self.settle()
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:  # noqa: ARG002
        """See :class:`concurrent.futures.Future`."""
        self.settle()
        return super().exception()

    def settle(self) -> None:
        """Wait for the reply."""
        with self._settling:
            if self.done():
                return
            outcome: Reply | Exception
            try:
                outcome = self._outcome()
            except (GeartrainError, AttemptFailed) as exc:
                outcome = exc
            except Exception as exc:  # a defect here must not leave the caller waiting for ever
                outcome = InternalError(f"reply of the {self._peer}: {exc!r}")
            finally:
                self._call = None  # the shard may still be at work in its memory, which then is nobody's
            if isinstance(outcome, Exception):
                self.set_exception(outcome)
            else:
                self.set_result(outcome)

    def _outcome(self) -> Reply:
        if self._call is None:
            raise AttemptFailed(f"{self._peer}: the wait for the reply was broken off")
        try:
            if not self._call.wait(max(0.0, self._deadline - time.monotonic())):
                assert self._connection is not None
                self._plane.had_no_answer(self._connection)
                raise AttemptFailed(f"{self._peer} does not answer: no reply in time")
        except _core.ConnectionLost as exc:
            if self._plane.is_closed or self._again is None:
                how = "closed" if self._plane.is_closed else "lost"
                raise AttemptFailed(f"{self._peer}: the connection is {how}") from exc
            left = self._deadline - time.monotonic()
            return self._again(None if left == math.inf else max(left, _LEAST_SECONDS)).result()
        if not isinstance(self._request, Pull):
            done: Done = self._call.done()
            return done
        with held(self._request.buffer_lease):
            self._place(self._request)
        return Done()

    def _place(self, pull: Pull) -> None:
        """Write the rows of the reply to where the pull wants them."""
        assert self._call is not None
        out, code = ops.as_bits(pull.out)  # a copy unless it is contiguous
        present = None if pull.present is None else np.ascontiguousarray(pull.present).view(np.uint8)
        ids = np.ascontiguousarray(pull.ids)
        positions = None if pull.positions is None else np.ascontiguousarray(pull.positions)
        self._call.place(out, code, ids, positions, present)
        if not pull.out.flags.c_contiguous:
            pull.out[...] = out.view(pull.out.dtype)
        if pull.present is not None and present is not None and not pull.present.flags.c_contiguous:
            pull.present[...] = present.view(np.bool_)
