"""Warnings about unresponsive peers: while a call has no reply, the role's health is checked.

A call that takes long and a stopped process look alike to the caller: both are silent. Health checks are answered by
threads without other work, so that a busy process answers and one that is stopped or cut off does not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

logger = logging.getLogger(__name__)

ASK_AFTER_SECONDS = 0.8
"""Time without a reply after which the health of a call's peer is checked."""
ANSWER_SECONDS = 0.8
"""Deadline of the check. An unresponsive peer is thus named within 2 s of a call."""
LONGEST_PAUSE_SECONDS = 30.0
"""Longest pause between two checks of a healthy peer that still gives no reply; pauses double up to it."""
_AT_ONCE = 16
_LOOKS = 6
"""Looks at the calls under way per ASK_AFTER_SECONDS."""


@dataclass(frozen=True)
class Peer:
    """A role that a call waits for."""

    name: str
    """Name in messages: "shard 1"."""
    address: str
    status_command: str = "geartrain status"
    """Command that shows more about it."""


class SilenceLog:
    """Log of unresponsive peers, each named once until it answers again. Thread-safe."""

    def __init__(self) -> None:
        self.named: set[Peer] = set()
        """Peers that were named and have not answered since; :meth:`record_reply` ignores all others."""
        self._lock = threading.Lock()

    def record_reply(self, peer: Peer) -> None:
        """Record that a peer has replied."""
        with self._lock:
            was_named = peer in self.named
            self.named.discard(peer)
        if was_named:
            logger.warning("%s at %s answers again", peer.name, peer.address)

    def should_warn(self, peer: Peer) -> bool:
        """Return whether to warn about a peer: it was not named since its last answer."""
        with self._lock:
            is_new = peer not in self.named
            self.named.add(peer)
        return is_new

    def check(self, silent: Callable[[], Sequence[Peer]], wait: str) -> None:
        """Check the health of the peers that ``silent`` returns, in parallel, and log those that do not answer, were
        not named and are still silent.

        ``wait`` is the time that calls wait for them: "up to 90 s". Returns after ANSWER_SECONDS, or soon after.
        """
        unnamed = [peer for peer in dict.fromkeys(silent()) if peer not in self.named]
        if not unnamed:
            return
        try:
            with ThreadPoolExecutor(min(_AT_ONCE, len(unnamed)), thread_name_prefix="geartrain-health") as pool:
                answers = list(pool.map(lambda peer: _answers(peer.address), unnamed))
        except RuntimeError as exc:  # no thread can be started, or this process ends
            logger.debug("silent roles are not asked for their health: %s", exc)
            return
        waiting = silent()
        for peer, has_answered in zip(unnamed, answers, strict=True):
            if not has_answered and peer in waiting and self.should_warn(peer):
                logger.warning(
                    "%s at %s does not answer; waiting for it %s. Its process may be stopped or its machine out of "
                    "reach ('%s')",
                    *(peer.name, peer.address, wait, peer.status_command),
                )


class _Wait:
    """A call under way."""

    def __init__(self, silent: Callable[[], Sequence[Peer]], wait: str, watch: SilenceWatch) -> None:
        self.silent, self.wait, self.watch = silent, wait, watch
        self._pause = ASK_AFTER_SECONDS
        self._next = time.monotonic() + self._pause

    def is_due(self) -> bool:
        """Return whether its peers are due for a check, the first or a repeated one."""
        if time.monotonic() < self._next:
            return False
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        self._next = time.monotonic() + self._pause
        return True

    def still_silent(self) -> Sequence[Peer]:
        """The peers that it waits for, unless it is over."""
        return self.silent() if id(self) in _waits else ()


_waits: dict[int, _Wait] = {}
"""The calls under way in this process."""
_looker: threading.Thread | None = None
"""Thread that looks at the calls: it runs while there are any."""
_looker_lock = threading.Lock()


class SilenceWatch(SilenceLog):
    """Warnings about unresponsive peers of calls in any threads, from a thread shared by all watches of a process."""

    def __init__(self) -> None:
        super().__init__()
        self._is_asking = False

    @contextmanager
    def over(self, silent: Callable[[], Sequence[Peer]], wait: str) -> Iterator[None]:
        """During the block, :meth:`ask` the peers that ``silent`` returns, once it takes long."""
        call = _Wait(silent, wait, self)
        _waits[id(call)] = call
        looker = _looker
        if looker is None or not looker.is_alive():  # in a forked child it is not
            _start_checking()
        try:
            yield
        finally:
            _waits.pop(id(call), None)

    def check_calls(self, waits: Sequence[_Wait]) -> None:
        """Check the peers of due calls on a new thread, unless a check is running."""
        if self._is_asking or not (due := [call for call in waits if call.is_due()]):
            return
        self._is_asking = True
        try:
            threading.Thread(target=self._check_calls, args=(due,), name="geartrain-silence", daemon=True).start()
        except RuntimeError as exc:  # as in ask
            logger.debug("silent roles are not asked for their health: %s", exc)
            self._is_asking = False

    def _check_calls(self, due: Sequence[_Wait]) -> None:
        try:
            for call in due:
                self.check(call.still_silent, call.wait)
        finally:
            self._is_asking = False


def _start_checking() -> None:
    global _looker
    with _looker_lock:
        if _looker is not None and _looker.is_alive():
            return
        _looker = threading.Thread(target=_check_loop, name="geartrain-lookout", daemon=True)
        try:
            _looker.start()
        except RuntimeError as exc:  # as in ask
            logger.debug("silent roles are not watched: %s", exc)


def _check_loop() -> None:
    global _looker
    while True:
        time.sleep(ASK_AFTER_SECONDS / _LOOKS)
        _check_waits()
        if not _waits:
            _looker = None  # the next call starts another
            if _waits:  # a call in between saw this thread as alive
                _start_checking()
            return


def _check_waits() -> None:
    """Check the calls; apart from :func:`_check_loop`, which would keep calls and their models alive in its sleep."""
    of_watch: dict[SilenceWatch, list[_Wait]] = {}
    for call in list(_waits.values()):
        of_watch.setdefault(call.watch, []).append(call)
    for watch, waits in of_watch.items():
        watch.check_calls(waits)


def _answers(address: str) -> bool:
    from geartrain.ams.rpc.client.health import answers  # an embedded cluster never loads gRPC

    return answers(address, ANSWER_SECONDS)
