"""Calls that wait for other callers, such as synchronous pushes, without a thread for each.

A call marked so (metadata WAITS_KEY) is served by a handler that returns at once; the reply is sent when it is there.
To gRPC that is a stream of one reply, which on the wire is the same as a reply. It costs a tenth of a millisecond more
than a call that holds a thread: so only calls that may wait are served like this.

A caller with a deadline shorter than the wait gets StepPending before it, rather than nothing: so it can tell an
incomplete group from a lost shard.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import grpc

from geartrain.ams.observe.call_counts import WELL, CallCounts
from geartrain.ams.rpc.server.threads import message_is_here
from geartrain.ams.rpc.status import status_of
from geartrain.ams.values.errors import GeartrainError, InternalError, StepPending

logger = logging.getLogger(__name__)

PATIENCE_SHARE = 0.8
"""Share of a call's time after which its caller gets StepPending."""
_POLL_SECONDS = 0.05
"""Interval of checks for due calls."""


class ActiveCall(NamedTuple):
    """A call under way."""

    reply: Future[Any]
    encode: Callable[[Any], bytes]
    """Encoder of the reply; may raise a GeartrainError instead."""
    waits: bool = False
    """Whether a missing reply may be due to other callers."""


BeginMethod = Callable[[bytes, grpc.ServicerContext], ActiveCall]
Send = Callable[[bytes | None], None]


class WaitingCalls:
    """Calls of one server that wait without a thread. Thread-safe."""

    def __init__(self, pool: ThreadPoolExecutor, counts: CallCounts) -> None:
        """``pool`` sends the replies: the thread that completes them must not wait for the network."""
        self._pool = pool
        self._counts = counts
        self._changed = threading.Condition()
        self._waiting: dict[_Call, float] = {}
        """Calls that get StepPending before their deadline, with its time."""
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def handler(self, name: str, begin: BeginMethod) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the handler of a method that ``begin`` starts."""

        def answer(data: bytes, servicer_context: grpc.ServicerContext, send: Send) -> None:
            message_is_here()
            began = time.perf_counter()

            def count(code: str, bytes_out: int) -> None:
                self._counts.add(name, code, time.perf_counter() - began, len(data), bytes_out)

            call = _Call(servicer_context, send, count)
            try:
                begun = begin(data, servicer_context)
            except GeartrainError as error:
                call.fail(error)
            except MemoryError as error:
                call.fail(InternalError(f"out of memory: {error}"))
            else:
                self._wait(call, begun)

        answer.experimental_non_blocking = True  # type: ignore[attr-defined]
        return grpc.unary_stream_rpc_method_handler(answer)

    def close(self) -> None:
        """Stop the thread that answers waiting calls. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _wait(self, call: _Call, begun: ActiveCall) -> None:
        if begun.reply.done():
            call.finish(begun)
            return
        seconds = call.servicer_context.time_remaining()
        if seconds is not None and math.isfinite(seconds):
            self._notify_in(call, seconds * PATIENCE_SHARE)

        def settled(_: Future[Any]) -> None:
            self._forget(call)
            self._later(partial(call.finish, begun))

        def ended() -> None:  # answered, or the caller left: cancel work that has not begun
            self._forget(call)
            begun.reply.cancel()

        begun.reply.add_done_callback(settled)
        if not call.servicer_context.add_callback(ended):
            ended()

    def _later(self, work: Callable[[], None]) -> None:
        try:
            self._pool.submit(work)
        except RuntimeError:  # the server has ended, and with it the call
            logger.debug("a reply came after the end of its server")

    def _notify_in(self, call: _Call, seconds: float) -> None:
        with self._changed:
            self._waiting[call] = time.monotonic() + seconds
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._notify, name="grpc-waiting", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _forget(self, call: _Call) -> None:
        with self._changed:
            self._waiting.pop(call, None)

    def _notify(self) -> None:
        pending = StepPending("other ranks of the sync group have not pushed yet; retry")
        while True:
            with self._changed:
                while not (self._waiting or self._is_closed):
                    self._changed.wait()
                if self._is_closed:
                    return
                now = time.monotonic()
                due = [call for call, until in self._waiting.items() if until <= now]
                for call in due:
                    del self._waiting[call]
                if not due:
                    self._changed.wait(_POLL_SECONDS)
            for call in due:
                self._later(partial(call.fail, pending))


class _Call:
    """A call that is answered once."""

    def __init__(self, servicer_context: grpc.ServicerContext, send: Send, count: Callable[[str, int], None]) -> None:
        self.servicer_context = servicer_context
        self._send = send
        self._count = count
        self._first = threading.Lock()

    def finish(self, begun: ActiveCall) -> None:
        """Send the result."""
        if begun.reply.cancelled():
            return  # the caller left
        try:
            data = begun.encode(begun.reply.result())
        except GeartrainError as error:
            self.fail(error)
        except Exception as error:  # a defect must not leave the caller waiting for ever
            logger.exception("a reply could not be made")
            self.fail(InternalError(repr(error)))
        else:
            if self._first.acquire(blocking=False):
                self._send(data)
                self._send(None)
                self._count(WELL, len(data))

    def fail(self, error: GeartrainError) -> None:
        """End the call with an error."""
        if not self._first.acquire(blocking=False):
            return
        status = status_of(error)
        self.servicer_context.set_trailing_metadata(status.trailing_metadata)
        self.servicer_context.set_code(status.code)
        self.servicer_context.set_details(status.details)
        self._send(None)
        self._count(type(error).__name__, 0)
