"""Incarnations of jobs, named streams and tables: numbers that only rise, assigned by the scheduler.

A higher one fences off lower ones: of writes in ``ams/kernels/csrc/writes`` (shards accept none far beyond what the
scheduler reports), of data streams in ``data_streams.py``. So callers' clocks must not decide it: a machine whose clock
is ahead would fence off its successors. The scheduler's own clock only has to put a scheduler without a store above its
predecessor in most cases; in all others the shards report what they have seen.
"""

from __future__ import annotations

import json
import logging
import threading
import time

from geartrain.ams.storage.kv.store import KeyValueStore
from geartrain.ams.values.errors import InvalidArgument

logger = logging.getLogger(__name__)

MAX_GIVEN = 2**62
"""Highest number that a caller may choose (nanoseconds of the year 2116): as many remain to be assigned."""
_KEY = "incarnations"
_GIVEN_SINCE = 2**32
"""Room for numbers a shard may have seen from an earlier scheduler, or from a caller that chose the highest allowed."""


class Incarnations:
    """Highest known incarnation, and the next. Thread-safe. Assigned numbers were first written to the store."""

    def __init__(self, store: KeyValueStore) -> None:
        """Load the state in ``store``."""
        self._store = store
        self._lock = threading.Lock()
        kept = store.read_all().get(_KEY)
        self._unheeded = 0
        """Last number that was too high."""
        self.last: int = 0 if kept is None else json.loads(kept)["last"]
        """Highest number assigned or reported."""

    def next(self) -> int:
        """Return a number higher than all before, and than the clock in nanoseconds. Raises StateFailed."""
        with self._lock:
            self._raise_to(max(self.last + 1, time.time_ns()))
            return self.last

    def check(self, what: str, number: int) -> None:
        """Raise InvalidArgument if ``number`` leaves too few above it: it was not assigned here, and is no sane
        choice."""
        if number > max(MAX_GIVEN, self.last):
            raise InvalidArgument(
                f"{what} is {number}; it must be at most 2^62 ({MAX_GIVEN}), or one that this scheduler issued"
            )

    def record_chosen(self, what: str, number: int) -> None:
        """Record a ``number`` that a caller chose: later ones are higher. Raises InvalidArgument, StateFailed."""
        self.check(what, number)
        if number > self.last:
            with self._lock:
                self._raise_to(number)

    def record_seen(self, number: int) -> bool:
        """Record the highest number that a shard has seen, perhaps from an earlier scheduler, as :meth:`record_chosen`.

        Its origin is unknown: a number that is too high is logged once and ignored (returns False). It is not stored,
        as shards repeat it; and a failing store must not cost a shard its heartbeat.
        """
        if number > max(MAX_GIVEN, self.last) + _GIVEN_SINCE:
            if number != self._unheeded:
                self._unheeded = number
                logger.warning("a shard reports incarnation %d, which no scheduler assigned; ignoring it", number)
            return False
        if number > self.last:
            with self._lock:
                self.last = max(self.last, number)
        return True

    def _raise_to(self, number: int) -> None:
        if number > self.last:
            self._store.write({_KEY: json.dumps({"last": number}).encode()})
            self.last = number
