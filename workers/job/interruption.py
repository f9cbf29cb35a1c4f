"""Graceful stop on Ctrl-C and SIGTERM: with a snapshot where there is something to save, and at once elsewhere.

Python runs signal handlers between two instructions of the main thread, which may be inside torch, NCCL or a disk for
minutes. So a thread receives each signal, too, and ends the process when its time is up: otherwise Kubernetes, Slurm or
docker would kill it without a message.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from geartrain.ams.client.cluster import Cluster

STOPPED = 3
"""Exit code of a training stopped by a signal, with a snapshot to resume from."""
NOTHING_SAVED = 130
"""Exit code of one without a snapshot, or before it looked for one."""
GRACE_SECONDS = 10.0
"""Time between a signal and the kill, as docker's. A process that cannot save says why a second earlier, and ends."""
PATIENCE_SECONDS = 5.0
"""Longest wait, after a signal, for a shard that does not answer."""
UNWIND_SECONDS = 3.0
"""Time for the main thread's present call, where there is nothing to save."""
_ONE_WISH_SECONDS = 1.0
"""Time in which signals count as one: a terminal signals both a worker and torchrun, which forwards it."""
_POLL_SECONDS = 0.1
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A signal came where nothing in progress needs an orderly end."""


class Interruption:
    """Whether a signal has asked to stop; :func:`interruption` listens for it."""

    def __init__(self) -> None:
        self._asked: float | None = None
        self._is_in_order = False
        self._awaited: Cluster | None = None
        self._has_ended = threading.Event()
        self.grace_seconds = GRACE_SECONDS
        self.doing = "started"
        """Activity of the process, for the message "Stopped while it ..."."""
        self.is_saving: Callable[[], bool] = lambda: False
        """Whether a snapshot is being written, which is always waited for."""
        self.saved: Callable[[], str | None] = lambda: None
        """Returns a sentence on the saved step and how to resume; None: nothing is saved."""

    def __call__(self) -> bool:
        """Return whether a signal came."""
        return self._asked is not None

    @contextmanager
    def in_order(self, awaited: Cluster | None = None) -> Iterator[None]:
        """Raise nothing on a signal inside the block, which checks for it and ends by itself. But give ``awaited`` up
        if it still waits for a shard a moment later: nothing can be saved there.
        """
        self._is_in_order, self._awaited = True, awaited
        try:
            yield
        finally:
            self._is_in_order, self._awaited = False, None

    @contextmanager
    def at_once(self, doing: str) -> Iterator[None]:
        """A part of :meth:`in_order` with nothing to save: raises Stopped, also for an earlier signal."""
        self._is_in_order, self.doing = False, doing
        try:
            if self():
                raise Stopped
            yield
        finally:
            self._is_in_order = True

    @property
    def why(self) -> str:
        """Message with the activity at the signal, and the saved step."""
        saved = self.saved() or "nothing is saved yet; the same command begins it again"
        return f"Stopped while it {self.doing}: {saved}"

    @property
    def exit_code(self) -> int:
        """Exit code of a process that stops now."""
        return NOTHING_SAVED if self.saved() is None else STOPPED

    def request_stop(self) -> None:
        """Record a signal. Raises Stopped outside of :meth:`in_order`."""
        if self._asked is None:
            self._asked = time.monotonic()
        if not self._is_in_order:
            raise Stopped

    def stop_listening(self) -> None:
        """Stop listening: the process need not end any more."""
        self._has_ended.set()

    def watch(self, signals: int) -> None:
        """Wait for a signal, reported by a byte in the pipe ``signals``, and make sure that this process ends."""
        while (came := os.read(signals, 1)) and came[0] not in _SIGNALS:
            pass  # of another signal
        self._asked = asked = since = time.monotonic()
        told, was_in_order = False, self._is_in_order
        while not self._has_ended.wait(_POLL_SECONDS):
            now, in_order, awaited = time.monotonic(), self._is_in_order, self._awaited
            patience = min(PATIENCE_SECONDS, self.grace_seconds / 2)
            if in_order and awaited is not None and now - asked > patience and awaited.waits_for_shard:
                awaited.cancel_waits()
                self._awaited = None
            is_saving = in_order and self.is_saving()
            if is_saving and not told and now - asked > self.grace_seconds - 1:
                _print_directly("A snapshot is still being written: give this worker more time before you kill it")
                told = True
            if is_saving or in_order is not was_in_order:  # the next part has its own time, too
                since, was_in_order = now, in_order
            if now - since > (self.grace_seconds - 1 if in_order else min(self.grace_seconds - 1, UNWIND_SECONDS)):
                _print_directly(f"{self.why} (it took longer than {now - asked:.0f} s to stop there)")
                os._exit(self.exit_code)


_current: Interruption | None = None


@contextmanager
def interruption() -> Iterator[Interruption]:
    """Yield the :class:`Interruption` of a block; a second signal stops at once. Nested blocks share it. Outside the
    main thread it sees no signals.
    """
    global _current
    asked = _current or Interruption()
    if _current is not None or threading.current_thread() is not threading.main_thread():
        yield asked
        return
    previous = {int(number): signal.getsignal(number) for number in _SIGNALS}
    heard = 0.0

    def request_stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        nonlocal heard
        if heard and time.monotonic() - heard > _ONE_WISH_SECONDS:
            signal.signal(number, previous[number])
            os.kill(os.getpid(), number)
        elif not heard:
            heard = time.monotonic()
            asked.request_stop()

    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    watch = threading.Thread(target=asked.watch, args=(reads,), name="interruption-watch", daemon=True)
    watch.start()
    for number in previous:
        signal.signal(number, request_stop)
    _current = asked
    try:
        yield asked
    finally:
        _current = None
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        asked.stop_listening()
        os.close(writes)
        watch.join()
        os.close(reads)


def _print_directly(line: str) -> None:
    """Write to stderr, bypassing this process's stream objects."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode())
