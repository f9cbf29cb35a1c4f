"""Tells people whom a call waits for: a role that leaves one without a reply is asked for its health beside it.

A call that takes long and a process that is stopped look alike from here: both are silent. The health check is answered
by threads that do no other work, so that one which is busy answers it and one that is stopped or cut off does not.
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
"""A call without a reply for so long has its peer asked for its health."""
ANSWER_SECONDS = 0.8
"""How long that may take. Whoever does not answer is thus named within 2 s of being called."""
LONGEST_PAUSE_SECONDS = 30.0
"""Between two questions to one that is well and still gives no reply: the pause doubles up to here."""
_AT_ONCE = 16
_LOOKS = 6
"""In ASK_AFTER_SECONDS, at the calls under way."""


@dataclass(frozen=True)
class Peer:
    """A role that a call waits for."""

    name: str
    """As in a sentence: "shard 1"."""
    address: str
    status_command: str = "geartrain status"
    """Tells more of it."""


class SilenceLog:
    """Logs which peers do not answer, each once until it was heard again. Thread-safe."""

    def __init__(self) -> None:
        self.named: set[Peer] = set()
        """Those that were named and not heard since: only of these :meth:`heard` does anything."""
        self._lock = threading.Lock()

    def heard(self, peer: Peer) -> None:
        """It has replied."""
        with self._lock:
            was_named = peer in self.named
            self.named.discard(peer)
        if was_named:
            logger.warning("%s at %s answers again", peer.name, peer.address)

    def tell(self, peer: Peer) -> bool:
        """Whether people are to be told that it does not answer: they were not since it was heard last."""
        with self._lock:
            is_new = peer not in self.named
            self.named.add(peer)
        return is_new

    def ask(self, silent: Callable[[], Sequence[Peer]], wait: str) -> None:
        """Ask the peers that ``silent`` returns for their health, side by side, and log those that do not answer, were
        not named and are silent still.

        ``wait`` says how long they are waited for: "up to 90 s". Returns after ANSWER_SECONDS, or soon after.
        """
        unnamed = [peer for peer in dict.fromkeys(silent()) if peer not in self.named]
        if not unnamed:
            return
        try:
            with ThreadPoolExecutor(min(_AT_ONCE, len(unnamed)), thread_name_prefix="geartrain-health") as pool:
                answers = list(pool.map(lambda peer: _answers(peer.address), unnamed))
        except RuntimeError as exc:  # no thread is to be had, or this process ends
            logger.debug("silent roles are not asked for their health: %s", exc)
            return
        waiting = silent()
        for peer, has_answered in zip(unnamed, answers, strict=True):
            if not has_answered and peer in waiting and self.tell(peer):
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
        """Whether it lasts so long that its peers are to be asked, again or for the first time."""
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
"""Looks at them: there is one while there are calls."""
_looker_lock = threading.Lock()


class SilenceWatch(SilenceLog):
    """Names the silent peers of calls that any threads wait in, from a thread that all watches of a process share."""

    def __init__(self) -> None:
        super().__init__()
        self._is_asking = False

    @contextmanager
    def over(self, silent: Callable[[], Sequence[Peer]], wait: str) -> Iterator[None]:
        """While the block lasts, :meth:`ask` those that ``silent`` returns, once it lasts long."""
        call = _Wait(silent, wait, self)
        _waits[id(call)] = call
        looker = _looker
        if looker is None or not looker.is_alive():  # in a forked child it is not
            _begin_to_look()
        try:
            yield
        finally:
            _waits.pop(id(call), None)

    def look(self, waits: Sequence[_Wait]) -> None:
        """Ask for those that are due, on a thread of its own, unless it is at that still."""
        if self._is_asking or not (due := [call for call in waits if call.is_due()]):
            return
        self._is_asking = True
        try:
            threading.Thread(target=self._ask, args=(due,), name="geartrain-silence", daemon=True).start()
        except RuntimeError as exc:  # as in ask
            logger.debug("silent roles are not asked for their health: %s", exc)
            self._is_asking = False

    def _ask(self, due: Sequence[_Wait]) -> None:
        try:
            for call in due:
                self.ask(call.still_silent, call.wait)
        finally:
            self._is_asking = False


def _begin_to_look() -> None:
    global _looker
    with _looker_lock:
        if _looker is not None and _looker.is_alive():
            return
        _looker = threading.Thread(target=_look, name="geartrain-lookout", daemon=True)
        try:
            _looker.start()
        except RuntimeError as exc:  # as in ask
            logger.debug("nobody looks after silent roles: %s", exc)


def _look() -> None:
    global _looker
    while True:
        time.sleep(ASK_AFTER_SECONDS / _LOOKS)
        _look_at_waits()
        if not _waits:
            _looker = None  # the next call begins another
            if _waits:  # one that came in between took this thread for alive
                _begin_to_look()
            return


def _look_at_waits() -> None:
    """Not a part of :func:`_look`, which would hold the calls, and with them models, while it sleeps."""
    of_watch: dict[SilenceWatch, list[_Wait]] = {}
    for call in list(_waits.values()):
        of_watch.setdefault(call.watch, []).append(call)
    for watch, waits in of_watch.items():
        watch.look(waits)


def _answers(address: str) -> bool:
    from geartrain.ams.rpc.client.health import answers  # an embedded cluster never loads gRPC

    return answers(address, ANSWER_SECONDS)
