"""What carries the rows of a call beside its gRPC message, and what becomes of the rows of a reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from geartrain.ams.pb.v1 import shard_pb2
from geartrain.ams.rpc.codec import framing
from geartrain.ams.rpc.payload.bulk import BulkConnection, BulkPool
from geartrain.ams.rpc.status import is_answer
from geartrain.ams.values.errors import BulkConnectionLost, ProtocolError
from geartrain.ams.values.interrupts import BufferLease, held
from geartrain.ams.values.shard_messages import Done, Pull, Reply

_NO_ANSWER = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


class BulkUse:
    """A bulk connection in use by one call."""

    def __init__(self, pool: BulkPool, connection: BulkConnection) -> None:
        self._pool, self._connection = pool, connection
        self.named = shard_pb2.BulkBytes(connection=connection.number, use=connection.num_uses)
        self.move: Callable[[BulkConnection, int, float | None], None]
        """Sends or receives the rows; in so many seconds, for an answer that is there ends nothing."""
        self.buffer_lease: BufferLease | None = None
        """Needed for that."""
        self._has_moved = self._has_left = False

    def moved(self, call: Any, timeout_seconds: float | None) -> bytes:
        """Move the rows while ``call`` is under way, and return its reply. Raises what the call raises, or
        BulkConnectionLost.
        """
        call.add_done_callback(self._break_off)
        lost: BulkConnectionLost | None = None
        try:
            with held(self.buffer_lease, self._connection.abort):
                self.move(self._connection, self.named.use, timeout_seconds)
        except BulkConnectionLost as exc:
            lost = exc  # which may be for the call's error: that says more
            if self.buffer_lease is not None and self.buffer_lease.has_ended:
                call.cancel()
        except BaseException:
            call.cancel()
            raise
        try:
            reply: bytes = call.result()
            if lost is not None:
                raise lost
        except (BulkConnectionLost, grpc.RpcError) as exc:
            if isinstance(exc, BulkConnectionLost) or _had_no_answer(exc):
                self._pool.distrust()  # another error of the shard's breaks the connection off, and says nothing of it
            raise
        finally:
            lost = None
        self._has_moved = True
        return reply

    def end(self) -> None:
        """Leave the connection: to the next call if all has moved, for else there may be more on it."""
        if self._has_left:
            return  # it has ended already
        self._has_left = True
        if self._has_moved:
            self._pool.give_back(self._connection)
        else:
            self._connection.close()

    def _break_off(self, call: Any) -> None:
        if call.code() is not grpc.StatusCode.OK:
            self._connection.abort()


def _had_no_answer(exc: grpc.RpcError) -> bool:
    return isinstance(exc, grpc.Call) and exc.code() in _NO_ANSWER and not is_answer(exc)


class Unpack:
    """Writes the rows of one reply where the pull wants them."""

    def __init__(self, pull: Pull, start: int, end: int, payload: BulkUse | None) -> None:
        self._pull, self._start, self._end, self._payload = pull, start, end, payload
        self._received: npt.NDArray[Any] | None = None
        """What came over a bulk connection; None: it is in its place."""

    def __call__(self, data: bytes) -> Reply:
        _, raw = framing.decode_framed(data, shard_pb2.PullReply)
        with held(self._pull.buffer_lease):
            self._unpack(raw)
        return Done()

    def _unpack(self, raw: Mapping[int, memoryview]) -> None:
        if self._payload is not None:
            self._place(self._received, self._present(raw.get(14)))
        else:
            self._place(self._rows(raw.get(15)), self._present(raw.get(14)))

    def receive(self, connection: BulkConnection, use: int, seconds: float | None) -> None:
        """Receive the rows over a bulk connection, where they shall go if that is one place."""
        rows = self._pull.out[self._start : self._end]
        if self._pull.positions is not None or not rows.flags.c_contiguous:
            rows = self._received = np.empty(rows.shape, rows.dtype)
        connection.receive(use, rows, seconds)

    def _rows(self, raw: memoryview | None) -> npt.NDArray[Any]:
        out = self._pull.out
        return framing.rows_from(raw, self._end - self._start, out.shape[1], out.dtype)

    def _present(self, raw: memoryview | None) -> npt.NDArray[np.bool_] | None:
        num_ids = self._end - self._start
        if self._pull.present is None:
            return None
        if raw is None or len(raw) != num_ids:
            raise ProtocolError(f"the shard did not say which of {num_ids} rows exist")
        return np.frombuffer(raw, np.bool_)

    def _place(self, rows: npt.NDArray[Any] | None, present: npt.NDArray[np.bool_] | None) -> None:
        pull, start, end = self._pull, self._start, self._end
        where: Any = slice(start, end) if pull.positions is None else pull.positions[start:end]
        if rows is not None:
            pull.out[where] = rows
        if pull.present is not None:
            pull.present[where] = present
