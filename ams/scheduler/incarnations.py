"""Numbers that only rise: incarnations of jobs, of named streams and of tables, as the scheduler gives them out.

A higher one shuts lower ones out: of writes in ``ams/kernels/csrc/writes`` (shards take none that is far beyond what
the scheduler tells them), of data streams in ``data_streams.py``. So no clock of the callers may decide it: a machine
whose clock is ahead would shut out its successors. Of the scheduler's own clock it is only asked that one without a
store begins above its predecessor in most cases; in all others the shards tell what they have seen.
"""

from __future__ import annotations

import json
import logging
import threading
import time

from geartrain.ams.storage.kv.store import KeyValueStore
from geartrain.ams.values.errors import InvalidArgument

logger = logging.getLogger(__name__)

MOST_GIVEN = 2**62
"""The highest that somebody else may choose (nanoseconds of the year 2116): as many are left to give out."""
_KEY = "incarnations"
_GIVEN_SINCE = 2**32
"""Of what a shard may have seen from an earlier scheduler, or from who chose the highest that a shard takes."""


class Incarnations:
    """The highest incarnation that is known, and the next. Thread-safe. What is given out was written to the store."""

    def __init__(self, store: KeyValueStore) -> None:
        """Go on from what ``store`` holds."""
        self._store = store
        self._lock = threading.Lock()
        kept = store.read_all().get(_KEY)
        self._unheeded = 0
        """The last number that was too high."""
        self.last: int = 0 if kept is None else json.loads(kept)["last"]
        """The highest that was given out or heard of."""

    def next(self) -> int:
        """Return one that is higher than all before, and than the clock in nanoseconds. Raises StateFailed."""
        with self._lock:
            self._raise_to(max(self.last + 1, time.time_ns()))
            return self.last

    def check(self, what: str, number: int) -> None:
        """Raise InvalidArgument if ``number`` leaves too few above it: it was not given here, and is no sane choice."""
        if number > max(MOST_GIVEN, self.last):
            raise InvalidArgument(
                f"{what} is {number}; it must be at most 2^62 ({MOST_GIVEN}), or one that this scheduler gave out"
            )

    def record_chosen(self, what: str, number: int) -> None:
        """Give out only higher ones than ``number``, which somebody has chosen. Raises InvalidArgument, StateFailed."""
        self.check(what, number)
        if number > self.last:
            with self._lock:
                self._raise_to(number)

    def record_seen(self, number: int) -> bool:
        """As :meth:`record_chosen`, of the highest that a shard has seen, which may be of an earlier scheduler.

        It may have it from anybody: too high a number is logged, once, and not heeded (False). It is not written, for
        shards say it again and again; and a store that fails costs no shard its heartbeat.
        """
        if number > max(MOST_GIVEN, self.last) + _GIVEN_SINCE:
            if number != self._unheeded:
                self._unheeded = number
                logger.warning("a shard has seen incarnation %d, which no scheduler gave out; it is not heeded", number)
            return False
        if number > self.last:
            with self._lock:
                self.last = max(self.last, number)
        return True

    def _raise_to(self, number: int) -> None:
        if number > self.last:
            self._store.write({_KEY: json.dumps({"last": number}).encode()})
            self.last = number
