"""Ctrl-C and SIGTERM as a wish to stop: in good order where there is something to save, and at once elsewhere."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

PATIENCE_SECONDS = 5.0
"""A shard that does not answer is waited for so much longer once a signal came."""
_LOOK_SECONDS = 0.1


class Stopped(KeyboardInterrupt):
    """A signal came where nothing is under way that has to be ended in good order."""


class Awaited(Protocol):
    """A cluster, as far as whoever waits for it asks."""

    @property
    def waits_for_shard(self) -> bool:
        """Whether a call waits for a shard that does not answer."""

    def give_up(self) -> None:
        """End every wait for a shard: no call succeeds any more."""


class Interruption:
    """Whether a signal has asked to stop; :func:`interruption` listens for it."""

    def __init__(self) -> None:
        self._asked = self._is_in_order = False
        self._awaited: Awaited | None = None

    def __call__(self) -> bool:
        """Whether one has."""
        return self._asked

    @contextmanager
    def in_order(self, awaited: Awaited | None = None) -> Iterator[None]:
        """While the block lasts, which looks and ends by itself, a signal raises nothing. But ``awaited`` is given up
        where it still waits for a shard a moment later: nothing can be saved there.
        """
        self._is_in_order, self._awaited = True, awaited
        try:
            yield
        finally:
            self._is_in_order, self._awaited = False, None

    def ask(self) -> None:
        """A signal came. Raises Stopped outside of :meth:`in_order`."""
        self._asked = True
        if not self._is_in_order:
            raise Stopped
        # Not threading.Thread: the main thread may hold locks that its start takes.
        _thread.start_new_thread(self._end_waits, ())

    def _end_waits(self) -> None:
        time.sleep(PATIENCE_SECONDS)
        while (awaited := self._awaited) is not None:
            if awaited.waits_for_shard:
                awaited.give_up()
                return
            time.sleep(_LOOK_SECONDS)


@contextmanager
def interruption() -> Iterator[Interruption]:
    """Yield what knows whether a signal has asked to stop; a second signal stops at once. Outside the main thread none
    comes.
    """
    asked = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        for known, handler in previous.items():
            signal.signal(known, handler)
        asked.ask()

    for number in previous:
        signal.signal(number, ask)
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
