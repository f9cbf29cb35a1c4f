"""Thread pool of a gRPC server that clients cannot exhaust by starting calls without sending their messages.

grpcio gives a call a thread when it starts, where it waits for the message without a time limit; the received part is
kept meanwhile. Here only a few calls read their messages at once, the others queue: connections whose messages arrive
go first, then machines and connections with few calls. A call that takes too long is cancelled: soon where others wait,
at the latest after :data:`MESSAGE_SECONDS`. But the first half of the reading calls have all that time: otherwise no
message would ever arrive over a slow network. A call with its message no longer counts as reading; it waits for one of
the worker threads.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from geartrain.ams.values.config import MIB

READING_BYTES = 256 * MIB
"""Bytes of messages read at once, for calls without a lane: as many calls read as fit a message of max_message_bytes
each into it, but at most 8 and at least 2."""
_MIN_READING, _MAX_READING = 2, 8
MESSAGE_SECONDS = 30.0
"""Longest time for a message to arrive."""
_CROWDED_SECONDS = 2.0
"""The same while others wait; it shrinks with their number."""
_POLL_SECONDS, _IDLE_LOOK_SECONDS = 0.1, 1.0


@dataclass(eq=False, slots=True)
class _Call:
    handle: Any
    """Handle of grpcio, to cancel it."""
    work: Callable[[], Any]
    began: float | None = None
    """Time at which it got a thread."""
    has_slot: bool = False

    @property
    def peer(self) -> str:
        """Connection of the call, as "ipv4:1.2.3.4:567"."""
        return str(self.handle.peer().decode())


def _host(peer: str) -> str:
    return peer.rpartition(":")[0]


_at_work = threading.local()


def message_is_here() -> None:
    """Record that the call of this thread has its message, and wait until its work may begin."""
    call = getattr(_at_work, "call", None)
    if call is not None:
        _at_work.threads.wait_for_slot(call)


class CallThreads(ThreadPoolExecutor):
    """Threads for ``max_calls`` working calls of a server, and for those that read their messages: two at once on a
    lane, whose messages are small, or as many as ``max_message_bytes`` leaves room for.

    Thread-safe.
    """

    def __init__(self, max_calls: int, name: str, max_message_bytes: int = READING_BYTES) -> None:
        self.max_reading = min(max(READING_BYTES // max_message_bytes, _MIN_READING), _MAX_READING)
        super().__init__(max_calls + self.max_reading, thread_name_prefix=name)
        self._slots = threading.Semaphore(max_calls)
        self._changed = threading.Condition()
        self._line: list[_Call] = []
        self._reading: set[_Call] = set()
        self._ended: Counter[str] = Counter()
        """Cancelled calls by connection, while calls are queued: their messages did not arrive."""
        self._is_over = False
        self._watch = threading.Thread(target=self._abort_slow_calls, name=f"{name}-watch", daemon=True)
        self._watch.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function on a thread: one that is not a call of grpcio counts as work."""
        handle = next((arg.call for arg in args if hasattr(arg, "call_details")), None)
        if handle is None:
            return super().submit(self._work, fn, args, kwargs)
        call = _Call(handle, partial(fn, *args, **kwargs))
        with self._changed:
            if not self._line and len(self._reading) < self.max_reading // 2:  # no client has too many
                self._reading.add(call)
                return super().submit(self._run, call)
            self._line.append(call)
            self._start_queued()
            self._changed.notify()
        return Future()  # grpcio ignores it

    def wait_for_slot(self, call: _Call) -> None:
        """Record that a call has its message; wait for its turn to work."""
        self._finish_reading(call)
        self._slots.acquire()
        call.has_slot = True

    def close(self) -> None:
        """Stop the thread that cancels slow calls. Idempotent."""
        with self._changed:
            self._is_over = True
            self._changed.notify()

    def _work(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self._slots:
            return fn(*args, **kwargs)

    def _start_queued(self) -> None:
        """Start reading the next queued calls, as far as the limits allow."""
        while self._line and len(self._reading) < self.max_reading:
            of_peer = Counter(reading.peer for reading in self._reading)
            of_host = Counter(map(_host, of_peer.elements()))

            def rank(call: _Call, of_host: Counter[str] = of_host, of_peer: Counter[str] = of_peer) -> tuple[int, ...]:
                peer = call.peer
                return self._ended[peer], of_host[_host(peer)], of_peer[peer]

            call = min(self._line, key=rank)
            _, others_of_host, others_of_peer = rank(call)
            if others_of_peer and others_of_host >= self.max_reading // 2:
                return
            self._line.remove(call)
            self._reading.add(call)
            super().submit(self._run, call)

    def _finish_reading(self, call: _Call) -> None:
        with self._changed:
            self._reading.discard(call)
            if self._line:
                self._start_queued()

    def _run(self, call: _Call) -> None:
        call.began, _at_work.call, _at_work.threads = time.monotonic(), call, self
        try:
            call.work()
        finally:
            _at_work.call = None
            if call.has_slot:
                self._slots.release()
            else:
                self._finish_reading(call)

    def _backoff(self, place: int) -> float:
        """Return how long a call may read while ``place`` calls that began earlier read."""
        if not self._line or place < self.max_reading // 2:
            return MESSAGE_SECONDS
        return max(_CROWDED_SECONDS / (1 + len(self._line) / 8), _POLL_SECONDS)

    def _abort_slow_calls(self) -> None:
        looked = time.monotonic()
        while True:
            with self._changed:
                seconds = _POLL_SECONDS if self._reading else _IDLE_LOOK_SECONDS
                self._changed.wait(seconds)
                if self._is_over:
                    return
                now = time.monotonic()
                stalled, looked = max(0.0, now - looked - seconds), now
                for call in self._reading:  # while this process had no processor, messages could not arrive
                    if call.began is not None:  # its thread sets it at any moment
                        call.began = min(call.began + stalled, now)
                begun = sorted((call.began, id(call), call) for call in self._reading if call.began is not None)
                slow = [reading for n, (began, _, reading) in enumerate(begun) if now - began > self._backoff(n)]
                self._ended.update(reading.peer for reading in slow)
                if not self._line:
                    self._ended.clear()
            for call in slow:
                call.handle.cancel()
